"""Halves of surrogate pairs become text that can be stored; where the reasoning of an answer may stand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.core.messages import equals, has_reasoning, reasoning_of, to_message, whole_json, whole_text
from openhands_rl_plugin.core.types import JsonObject, Message, Node


@given(st.text(st.characters(exclude_categories=())))
def test_every_text_becomes_one_that_a_file_can_hold(text: str) -> None:
    whole = whole_text(text)
    whole.encode()
    assert whole_text(whole) == whole and (whole == text or any("\ud800" <= letter <= "\udfff" for letter in text))


def test_halves_are_replaced_and_pairs_are_joined() -> None:
    assert whole_text("a\ud83d") == "a\ufffd" and whole_text("\ud83d\ude00") == "\U0001f600"
    parsed = json.loads('{"\\udc00": ["\\ud83d", 1, null, true, {"a": "b"}]}')
    assert whole_json(parsed) == {"\ufffd": ["\ufffd", 1, None, True, {"a": "b"}]}


def test_half_a_character_from_a_host_is_understood() -> None:
    call = {"id": "1", "function": {"name": "run", "arguments": "\udc80"}}
    wire = {"role": "assistant", "content": "half \ud83d", "tool_calls": [call]}
    message = to_message(wire)
    assert message.content == "half \ufffd" and message.tool_calls[0].arguments == "\ufffd"
    assert equals(wire, message) and not equals(wire, Message(role="assistant", content="half \ufffd"))


THOUGHT = [{"type": "thinking", "thinking": "Hm."}]


@pytest.mark.parametrize(
    ("metadata", "expected", "text"),
    [
        ({"reasoning_content": "Hm."}, "4", "Hm."),
        ({"message": {"reasoning": "Hm."}}, "4", "Hm."),
        ({"response": {"choices": [{"message": {"thinking_blocks": THOUGHT}}]}}, "4", "Hm."),
        ({"message": {"content": THOUGHT}}, "4", "Hm."),
        ({"message": {"thinking_blocks": [{"type": "redacted_thinking", "data": "x"}]}}, "4", None),
        ({}, "<think>Hm.</think>4", None),
        *((empty, "4", None) for empty in ({}, {"reasoning_content": ""}, {"response": {"choices": []}})),
    ],
)
def test_reasoning_is_found_wherever_it_stands(metadata: JsonObject, expected: str, text: str | None) -> None:
    node = Node(parent=None, message=Message(role="assistant", content=expected), metadata=metadata)
    assert has_reasoning(node) == ("Hm." in f"{metadata}{expected}" or "redacted" in str(metadata))
    assert reasoning_of(node) == text
