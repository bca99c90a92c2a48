"""Search statistics in the nodes' metadata, and the equality of two actions."""

from __future__ import annotations

import json

from openhands_rl_plugin.core.tree import DraftNode
from openhands_rl_plugin.core.types import JsonObject, Message, Node

NOTES = "search"
"""The key of the strategies' own part of a node's metadata."""


def notes(node: DraftNode | Node) -> JsonObject:
    """The strategies' part of a node's metadata, to be read."""
    found = node.metadata.get(NOTES)
    return found if isinstance(found, dict) else {}


def note(node: DraftNode) -> JsonObject:
    """The strategies' part of a node's metadata, to be written."""
    found = node.metadata.setdefault(NOTES, {})
    assert isinstance(found, dict)
    return found


def ended(node: DraftNode) -> bool:
    """Whether the episode ended, in a simulation, with this action."""
    return "ended" in notes(node)


def times_merged(noted: JsonObject) -> int:
    """How often an equal action was sampled again."""
    merged = noted.get("merged", 0)
    return merged if isinstance(merged, int) else 0


def action_key(message: Message) -> tuple[object, ...]:
    """A key that is equal for equal answers: the text without white space around it, and the calls without their ids,
    and without the white space and the order of keys in their arguments.

    The whole text counts: two thoughts that end in the same ``Action:`` are two actions, because only the
    environment knows how it reads an answer.
    """
    calls = tuple((call.name, _arguments(call.arguments)) for call in message.tool_calls)
    return (message.content or "").strip(), calls


def _arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()
