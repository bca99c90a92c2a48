"""Against OpenHands' own converter between native calls and text."""

from __future__ import annotations

import copy
from typing import Any

from exchange_samples import CODE, TOOLS, call, said, same_talk, told
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from openhands.llm import fn_call_converter as reference

from openhands_rl_plugin.core.messages import to_message, to_wire
from openhands_rl_plugin.core.templates.text_form import single_call_turns, text_messages
from openhands_rl_plugin.core.types import Message
from openhands_rl_plugin.trajectories.exchange.formats import until_last_answer

# OpenHands 1.6 cannot describe the parameters of a tool that has none.
_TOOLS = [*TOOLS]


def to_text(messages: list[Message]) -> list[dict[str, Any]]:
    wire = [{**to_wire(message), "content": message.content or ""} for message in messages]
    return reference.convert_fncall_messages_to_non_fncall_messages(wire, _TOOLS, add_in_context_learning_example=False)


def to_native(messages: list[dict[str, Any]]) -> list[Message]:
    found = reference.convert_non_fncall_messages_to_fncall_messages(copy.deepcopy(messages), _TOOLS)
    return [to_message(message) for message in found]


def test_splitting_is_that_of_the_reference() -> None:
    wire = [to_wire(message) for message in CODE]
    theirs = reference.convert_from_multiple_tool_calls_to_single_tool_call_messages(wire, True)
    assert same_talk(single_call_turns(CODE), [to_message(message) for message in theirs])


_PLAIN = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>\n"), min_size=1, max_size=30).filter(
    lambda text: text == text.strip()
)


@settings(max_examples=100, deadline=None)
@given(_PLAIN, _PLAIN, st.integers(0, 99), st.lists(st.integers(-1, 99), max_size=3), _PLAIN)
def test_where_the_reference_is_lossless_our_bytes_are_the_same(
    thought: str, value: str, line: int, span: list[int], result: str
) -> None:
    arguments = {"command": "insert", "path": "/a", "new_str": value, "insert_line": line, "view_range": span}
    messages = [
        Message(role="user", content="Go."),
        said(call("toolu_01", "str_replace_editor", **arguments), text=thought),
        told("toolu_01", "str_replace_editor", result),
        said(text="Done."),
    ]
    theirs = to_text(messages)
    assume(same_talk(to_native(theirs), messages))
    ours = list(text_messages(messages, _TOOLS))[1:]
    assert ours == [{"role": each["role"], "content": each["content"]} for each in theirs]


def test_a_conversation_for_training_ends_with_an_answer() -> None:
    assert until_last_answer(CODE[:7]) == list(CODE[:5])
    assert until_last_answer(CODE[:2]) == []
