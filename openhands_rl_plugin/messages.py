"""Chat messages in OpenAI's wire format, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openhands_rl_plugin.types import Message, ToolCall

WireMessage = Mapping[str, Any]
"""A chat message as a client sends it: content is text or a list of parts."""


def to_message(wire: WireMessage) -> Message:
    """The message with its text parts joined by line breaks, as chat templates join them."""
    return Message(
        role=wire["role"],
        content=text_of(wire.get("content")),
        tool_calls=tuple(
            ToolCall(
                id=call.get("id") or "",
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
            )
            for call in wire.get("tool_calls") or ()
        ),
        tool_call_id=wire.get("tool_call_id"),
        name=wire.get("name"),
    )


def to_wire(message: Message) -> dict[str, Any]:
    """The message as an OpenAI chat message."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        wire["name"] = message.name
    return wire


def text_of(content: object) -> str | None:
    """Content as plain text; a part that is no text (an image) is named in brackets."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        return str(content)
    if len(content) == 1 and content[0].get("type") == "text":
        return content[0]["text"]
    return "\n".join(part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in content)


def says(wire: WireMessage, message: Message) -> bool:
    """Whether both say the same. Hot: called for every message of every prompt, so it builds nothing."""
    if (
        wire["role"] != message.role
        or wire.get("tool_call_id") != message.tool_call_id
        or (text_of(wire.get("content")) or "") != (message.content or "")
    ):
        return False
    calls = wire.get("tool_calls") or ()
    if not calls and not message.tool_calls:
        return True
    return len(calls) == len(message.tool_calls) and all(
        (call.get("id") or "") == own.id
        and call["function"]["name"] == own.name
        and call["function"]["arguments"] == own.arguments
        for call, own in zip(calls, message.tool_calls, strict=True)
    )
