"""Streams of an OpenAI-compatible server, well-behaved and not, put together to the answer that was meant."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_server import raw_server, respond

from openhands_rl_plugin.core.errors import InfrastructureError, ModelError
from openhands_rl_plugin.core.protocols import StreamingEngine
from openhands_rl_plugin.core.types import Completion, Message, PolicyRef, Tokens, Usage
from openhands_rl_plugin.models.engines.openai import OpenAIEngine
from openhands_rl_plugin.models.engines.openai_wire import EventStreamReader

ASK = (Message(role="user", content="hi"),)


def chunk(delta: dict[str, Any], *, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "delta": delta}
    if ids is not None:
        choice |= {"token_ids": ids, "logprobs": {"content": [{"token": "x", "logprob": -0.5} for _ in ids]}}
    top = {name: more.pop(name) for name in ("prompt_token_ids", "usage") if name in more}
    return {"id": "r1", "model": "policy-v000003", "choices": [{**choice, **more}], **top}


def stream(*events: Any, done: bool = True, line: str = "\n\n") -> bytes:
    body = "".join(f"data: {json.dumps(event, ensure_ascii=False)}{line}" for event in events)
    return (body + ("data: [DONE]\n\n" if done else "")).encode()


def usage(sampled: int) -> dict[str, Any]:
    return {**chunk({}), "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": sampled}}


async def ask(*answers: bytes, **options: Any) -> tuple[list[Any], list[Any]]:
    """What an engine gives, and what the server was asked."""
    left = list(answers)
    async with raw_server(lambda path, body: left.pop(0) if left[1:] else left[0]) as server:
        engine = OpenAIEngine(
            "policy-v000003", f"{server.url}/v1", base_model="base", **{"timeout": 5.0, "backoff": 0.01, **options}
        )
        assert isinstance(engine, StreamingEngine)
        try:
            given = [piece async for piece in engine.stream(ASK)]
        finally:
            await engine.aclose()
    return given, [body for _, body in server.requests]


def events(*parts: Any, **more: Any) -> bytes:
    return respond(stream(*parts, **more), content_type="text/event-stream; charset=utf-8")


WHOLE = (
    chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2, 3]),
    chunk({"content": "Hel"}, ids=[7]),
    chunk({"content": "lo\u2028 wor"}, ids=[8, 9]),
    chunk({"content": "ld"}, ids=[10]),
    chunk({}, ids=[], finish_reason="stop"),
    usage(4),
)


async def test_texts_then_the_completion_with_its_tokens() -> None:
    (*texts, completion), (asked,) = await ask(events(*WHOLE))
    assert texts == ["Hel", "lo\u2028 wor", "ld"]
    assert completion == Completion(
        message=Message(role="assistant", content="Hello\u2028 world"),
        tokens=Tokens(prompt_ids=(1, 2, 3), sampled_ids=(7, 8, 9, 10), logprobs=(-0.5,) * 4),
        finish_reason="stop",
        usage=Usage(prompt_tokens=3, completion_tokens=4, calls=1),
        policy=PolicyRef(base_model="base", adapter="policy", version=3),
        sampling=completion.sampling,
        metadata={"response_id": "r1", "attempts": 1},
    )
    assert asked["stream"] is True and asked["return_token_ids"] is True


async def test_ids_that_are_not_all_there_are_no_tokens() -> None:
    (*_, completion), _ = await ask(events(*WHOLE[:2], *WHOLE[3:]))
    assert completion.message.content == "Helld" and completion.tokens is None


async def test_what_had_not_begun_is_asked_for_again_without_what_was_refused() -> None:
    refused = respond({"error": {"message": "return_token_ids: unknown"}}, "400 Bad Request")
    (*texts, completion), asked = await ask(respond("busy", "503 Service Unavailable"), refused, events(*WHOLE))
    assert texts == ["Hel", "lo\u2028 wor", "ld"] and completion.metadata["attempts"] == 2
    assert ["return_token_ids" in body for body in asked] == [True, True, False]


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (events(*WHOLE[:3], done=False), InfrastructureError, "ended before its answer did"),
        (events(*WHOLE[:2], {"error": {"message": "stopping", "code": 503}}), InfrastructureError, "stopping"),
        (events(*WHOLE[:2], ["no chunk"]), ModelError, "not a chat completion"),
        (respond(b"data: {\n\n", content_type="text/event-stream"), ModelError, "not a chat completion"),
        (respond({"error": {"message": "too long"}}, "400 Bad Request"), ModelError, "too long"),
    ],
)
async def test_what_broke_is_told_and_not_asked_for_again(answer: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        await ask(answer)


@given(st.lists(st.integers(1, 12), max_size=60))
def test_it_does_not_matter_where_the_network_cuts(sizes: list[int]) -> None:
    data, reader = b": hello\r\n\r\n" + stream(*WHOLE, line="\r\n\r\n"), EventStreamReader()
    whole, found = EventStreamReader().feed(data), []
    for size in sizes:
        found += reader.feed(data[:size])
        data = data[size:]
    assert [*found, *reader.feed(data)] == whole
    assert [json.loads(each.data) for each in whole[1:-1]] == [*WHOLE]
