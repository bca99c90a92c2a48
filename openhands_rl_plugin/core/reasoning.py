"""Where the reasoning of an answer stands: beside its content, under one of several names, or among its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from openhands_rl_plugin.core.types import Message, Node

REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of content parts that hold reasoning (or a cipher of it) instead of what the assistant says."""

_NAMES = ("reasoning_content", "reasoning", "thinking")
_ENDS = ("</think>", "</thinking>", "</reasoning>")
_TEXTS = ("thinking", "reasoning", "text")


class SpokenMessage(Message):
    """A message on its way into or out of a tree, where its reasoning stands beside it. ``sampled``: the policy's."""

    reasoning: str | None = None
    sampled: bool = False


def plain_message(message: Message) -> Message:
    """The message as a tree keeps it."""
    if type(message) is Message:
        return message
    return Message(**{name: getattr(message, name) for name in Message.model_fields})


def reasoning_with(message: Message) -> str | None:
    """The reasoning of a ``SpokenMessage``; other messages have none."""
    return message.reasoning if isinstance(message, SpokenMessage) else None


def reasoning_in(wire: Mapping[str, object]) -> str | None:
    """The reasoning of a chat message in any of the forms of OpenAI-like and Anthropic-like servers, or ``None``."""
    for name in _NAMES:
        if isinstance(text := wire.get(name), str) and text:
            return text
    said = ([text for name in _TEXTS if isinstance(text := part.get(name), str) and text][:1] for part in _parts(wire))
    return "\n".join(text for texts in said for text in texts) or None


def reasoning_of(node: Node) -> str | None:
    """The reasoning that was recorded or imported with a node, or ``None``."""
    return next((text for wire in _wires(node) if (text := reasoning_in(wire)) is not None), None)


def has_reasoning(node: Node) -> bool:
    """Whether an answer had a part of thinking: in its text, or beside it, where it may be a cipher."""
    in_text = any(mark in (node.message.content or "") for mark in _ENDS)
    return in_text or any(reasoning_in(wire) or any(_parts(wire)) for wire in _wires(node))


def _wires(node: Node) -> Iterator[Mapping[str, object]]:
    """The places of a node that may have the fields of a chat message."""
    held = node.metadata
    for wire in (held, held.get("message"), _first_message(held.get("response"))):
        if isinstance(wire, Mapping):
            yield wire


def _parts(wire: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    for parts in (wire.get("thinking_blocks"), wire.get("content")):
        for part in parts if isinstance(parts, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") in REASONING_PARTS:
                yield part


def _first_message(response: object) -> object:
    choices = response.get("choices") if isinstance(response, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return first.get("message") if isinstance(first, Mapping) else None
