"""Where an answer's reasoning may stand, for all who look for it."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.core.messages import has_reasoning, reasoning_of
from openhands_rl_plugin.core.types import JsonObject, Message, Node

THOUGHT = [{"type": "thinking", "thinking": "Hm."}]


@pytest.mark.parametrize(
    ("metadata", "said", "text"),
    [
        ({"reasoning_content": "Hm."}, "4", "Hm."),
        ({"message": {"reasoning": "Hm."}}, "4", "Hm."),
        ({"response": {"choices": [{"message": {"thinking_blocks": THOUGHT}}]}}, "4", "Hm."),
        ({"message": {"content": THOUGHT}}, "4", "Hm."),
        ({"message": {"thinking_blocks": [{"type": "redacted_thinking", "data": "x"}]}}, "4", None),
        ({}, "<think>Hm.</think>4", None),
    ],
)
def test_reasoning_is_found_wherever_it_stands(metadata: JsonObject, said: str, text: str | None) -> None:
    node = Node(parent=None, message=Message(role="assistant", content=said), metadata=metadata)
    assert has_reasoning(node) and reasoning_of(node) == text


@pytest.mark.parametrize("metadata", [{}, {"reasoning_content": ""}, {"response": {"choices": []}}, {"message": "4"}])
def test_an_answer_without_reasoning_has_none(metadata: JsonObject) -> None:
    node = Node(parent=None, message=Message(role="assistant", content="4"), metadata=metadata)
    assert not has_reasoning(node) and reasoning_of(node) is None
