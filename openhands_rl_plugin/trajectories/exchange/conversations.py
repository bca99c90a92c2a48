"""Conversations in rows: OpenAI's chat messages with reasoning, and arguments as objects or as text.

Chat templates differ in what they want. Those of Qwen2.5 and Llama 3.1 print a text once more as JSON, so that a model
would learn to quote its arguments; DeepSeek V3's takes text only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import JsonValue

from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.reasoning import SpokenMessage, reasoning_of, reasoning_with
from openhands_rl_plugin.core.types import JsonObject, Message, Node, Trajectory
from openhands_rl_plugin.trajectories.exchange.writing import JSON, Columns

ArgumentsForm = Literal["object", "string"]
ARGUMENTS_FORMS: tuple[ArgumentsForm, ...] = ("object", "string")

CONVERSATION: list[Any] = [
    {
        "role": "string",
        "content": "string",
        "reasoning_content": "string",
        "tool_calls": [{"id": "string", "type": "string", "function": {"name": "string", "arguments": JSON}}],
        "tool_call_id": "string",
        "name": "string",
    }
]
"""The Parquet type of a conversation; trainers take null for absent."""
TOOLS: list[Any] = [JSON]
_ARGUMENTS = "arguments"


def spoken_messages(trajectory: Trajectory, leaf: int | None = None) -> list[SpokenMessage]:
    """The messages from the root to ``leaf`` (default: the head), answers with their reasoning."""
    return spoken(trajectory, trajectory.path(leaf))


def spoken(trajectory: Trajectory, nodes: Sequence[int]) -> list[SpokenMessage]:
    """The messages of some nodes, answers with their reasoning."""
    return [_spoken(trajectory.nodes[at]) for at in nodes]


def wire_of(message: Message) -> JsonObject:
    """An OpenAI chat message, its reasoning in ``reasoning_content``."""
    wire: JsonObject = to_wire(message)
    reasoning = reasoning_with(message)
    return wire if reasoning is None else {**wire, "reasoning_content": reasoning}


def conversation_of(trajectory: Trajectory, path: Sequence[int]) -> list[JsonValue]:
    """The messages of some nodes, for a row."""
    return [wire_of(message) for message in spoken(trajectory, path)]


def _spoken(node: Node) -> SpokenMessage:
    reasoning = reasoning_of(node) if node.message.role == "assistant" else None
    return SpokenMessage(**dict(node.message), reasoning=reasoning, sampled=node.sampled)


def arguments_object(arguments: str) -> JsonObject | None:
    """The arguments of a call as an object; ``None`` when the text is none."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def with_objects(row: JsonObject) -> JsonObject:
    """The row with the arguments of all calls as objects; a malformed text stays as it is."""
    return {name: _with_objects(value) if isinstance(value, list) else value for name, value in row.items()}


def as_text(columns: Columns) -> Columns:
    """The columns for rows whose arguments are text."""
    return {name: _as_text(kind) for name, kind in columns.items()}


def _with_objects(messages: list[JsonValue]) -> list[JsonValue]:
    return [_message_with_objects(each) if isinstance(each, dict) else each for each in messages]


def _message_with_objects(message: JsonObject) -> JsonObject:
    calls = message.get("tool_calls")
    return (
        {**message, "tool_calls": [_call_with_object(call) for call in calls]} if isinstance(calls, list) else message
    )


def _call_with_object(call: JsonValue) -> JsonValue:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get(_ARGUMENTS)
    value = arguments_object(arguments) if isinstance(arguments, str) else None
    return call if value is None else {**call, "function": {**function, _ARGUMENTS: value}}


def _as_text(kind: Any) -> Any:
    if isinstance(kind, Mapping):
        return {name: "string" if name == _ARGUMENTS else _as_text(inner) for name, inner in kind.items()}
    return [_as_text(each) for each in kind] if isinstance(kind, list) else kind
