"""Whatever JSON a client or a server sends: it can be recorded, or is named as what cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.models.engines.chunks import EventStreamReader
from openhands_rl_plugin.models.gateway.chat_completions import CHAT
from openhands_rl_plugin.models.gateway.messages import MESSAGES
from openhands_rl_plugin.models.gateway.protocol import WireProtocol
from openhands_rl_plugin.models.gateway.requests import Unrecordable
from openhands_rl_plugin.models.gateway.responses import UpstreamResponse
from openhands_rl_plugin.models.gateway.responses_api import RESPONSES
from openhands_rl_plugin.models.gateway.sessions import session_name

FIELDS = """
type role content text name id input call_id arguments function tool_calls tool_call_id output summary thinking
tools metadata user_id usage input_tokens output_tokens status incomplete_details reason index delta message
content_block partial_json stop_reason finish_reason choices logprobs token_ids prompt_token_ids response item
output_index system messages input_schema reasoning effort stop stream n model max_tokens stream_options error
provider_specific_fields completion_tokens refusal previous_response_id instructions stop_sequences action
"""
WORDS = """
user assistant system tool text tool_use tool_result thinking message message_start content_block_start function
content_block_delta message_delta message_stop text_delta input_json_delta function_call reasoning output_text
custom_tool_call function_call_output response.completed response.output_item.done item_reference completed
incomplete local_shell_call refusal stop [DONE]
"""
FIELD = st.sampled_from(FIELDS.split())
PLAIN = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats(allow_nan=False) | st.sampled_from(WORDS.split())
ANY = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELD, inner, max_size=5))
OBJECT = st.dictionaries(FIELD, ANY, max_size=7)
PROTOCOLS = pytest.mark.parametrize("protocol", [CHAT, MESSAGES, RESPONSES], ids=lambda each: each.path)


def recorded[T](read: Callable[[], T]) -> T | None:
    try:
        return read()
    except Unrecordable as problem:
        assert str(problem)
        return None


def with_part(part: Any) -> list[Any]:
    """The part in each of the places where a request, or an answer, has its parts."""
    said = {"role": "assistant", "content": [part], "tool_calls": [part]}
    return [
        {
            "messages": [{"role": "user", "content": "x"}, said, part],
            "input": [part],
            "tools": [part],
            "system": [part],
        },
        {"messages": [part], "input": [{"type": "message", "role": "assistant", "content": [part]}], "tools": part},
        {"content": [part], "output": [part], "choices": [part], "usage": part},
        {"output": [{"type": "message", "content": [part]}], "choices": [{"message": part}]},
    ]


@PROTOCOLS
@settings(max_examples=100, deadline=None)
@given(document=ANY | OBJECT, part=OBJECT)
def test_requests(protocol: WireProtocol, document: Any, part: Any):
    for each in (document, *with_part(part)):
        call = recorded(lambda each=each: protocol.parse(json.dumps(each).encode()))
        if call is not None:
            assert [to_message(message).role for message in call.messages]
            json.dumps([call.parameters, call.tools])
            call.sampling()
            protocol.wanted(call)
            assert session_name("", "client", {}, call.document, call.messages).name


@PROTOCOLS
@settings(max_examples=100, deadline=None)
@given(document=ANY | OBJECT, part=OBJECT)
def test_answers(protocol: WireProtocol, document: Any, part: Any):
    for each in (document, *with_part(part)):
        check(recorded(lambda each=each: protocol.answer(json.dumps(each).encode())))


@PROTOCOLS
@settings(max_examples=100, deadline=None)
@given(parts=st.lists(OBJECT | ANY, max_size=6), cut=st.integers(1, 40))
def test_streams(protocol: WireProtocol, parts: list[Any], cut: int):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "input": "x", "stream": True}
    stream, reader = protocol.stream(protocol.parse(json.dumps(body).encode())), EventStreamReader()
    ends: list[Any] = [{"type": "message_stop"}, {"type": "response.completed", "response": {"output": parts}}]
    text = b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in [*parts, *ends])
    events = [event for at in range(0, len(text), cut) for event in reader.feed(text[at : at + cut])]
    assert b"".join(event.raw for event in events) == text and reader.rest() == b""
    for event in events:
        assert isinstance(stream.feed(event), bytes)
    check(recorded(stream.whole))


def check(answer: UpstreamResponse | None) -> None:
    if answer is not None:
        assert answer.usage().calls == 1 and isinstance(answer.model, str)
        json.dumps([answer.about, *(choice.extra for choice in answer.choices)])
