"""Chat messages in OpenAI's wire format, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from openhands_rl_plugin.core.reasoning import REASONING_PARTS
from openhands_rl_plugin.core.types import Message, Observation, ToolCall

WireMessage = Mapping[str, Any]
"""A chat message as a client sends it: content is text or a list of parts."""

RECORDED_PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_completion_tokens",
    "max_tokens",
    "stop",
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "reasoning_effort",
    "response_format",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
)
"""What is kept of a request beside its messages and tools. Named one by one: a request may carry keys and headers."""

NEUTRAL_PARAMETERS: Mapping[str, float] = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""The values with which a server samples from the model's own distribution, at any temperature.

They are sent, because servers have other defaults: vLLM and SGLang take absent ones from the model's
``generation_config.json`` (Qwen2.5-Instruct: a top_k of 20 and a repetition_penalty of 1.05), llama.cpp has a top_k of
40 and a min_p of 0.05 of its own.
"""


def altering_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``given`` beside the temperature with which a server samples from another distribution, with values."""
    neutral = {"top_p": 1.0, **NEUTRAL_PARAMETERS}
    found = {name: given[name] for name, value in neutral.items() if given.get(name) not in (None, value)}
    return {name: value for name, value in found.items() if (name, value) != ("top_k", 0)}


def to_message(wire: WireMessage) -> Message:
    """The message in whole characters, with its text parts joined by line breaks, as chat templates join them."""
    said = Message(
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
    return whole_message(said)


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
    """Content as plain text, without reasoning; another part that is no text (an image) is named in brackets."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        return str(content)
    if any(part.get("type") in REASONING_PARTS for part in content):
        spoken = [part for part in content if part.get("type") not in REASONING_PARTS]
        return text_of(spoken) if spoken else None
    if len(content) == 1 and (only := content[0]).get("type") == "text":
        return only["text"]
    return "\n".join(part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in content)


def says(wire: WireMessage, message: Message) -> bool:
    """Whether both say the same. Hot: called for every message of every prompt, so it builds nothing."""
    if wire["role"] != message.role or wire.get("tool_call_id") != message.tool_call_id:
        return False
    said, kept = text_of(wire.get("content")), message.content
    if said != kept and not _same(said or "", kept or ""):
        return False
    calls, own_calls = wire.get("tool_calls") or (), message.tool_calls
    return (not calls and not own_calls) or (
        len(calls) == len(own_calls)
        and all(
            (call.get("id") or "") == own.id
            and call["function"]["name"] == own.name
            and _same(call["function"]["arguments"], own.arguments)
            for call, own in zip(calls, own_calls, strict=True)
        )
    )


def is_json_object(text: str) -> bool:
    """Whether a call's arguments are one: servers refuse a conversation with others."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def whole_text(text: str) -> str:
    """The text with U+FFFD for every half of a surrogate pair, which JSON can spell but no file can hold."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def whole_json(value: JsonValue) -> JsonValue:
    """The value with ``whole_text`` for every text in it."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, dict):
        return {whole_text(name): whole_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [whole_json(each) for each in value]
    return value


def whole_message(message: Message) -> Message:
    """The message with ``whole_text`` for every text in it; itself when that changes nothing."""
    texts = [message.content or "", message.tool_call_id or "", message.name or ""]
    for call in message.tool_calls:
        texts += (call.id, call.name, call.arguments)
    if all(whole_text(text) is text for text in texts):
        return message
    return Message.model_validate(whole_json(message.model_dump()))


def whole_observation(observation: Observation) -> Observation:
    """The observation with ``whole_message`` for every message."""
    return observation.model_copy(update={"messages": tuple(map(whole_message, observation.messages))})


def _same(said: str, kept: str) -> bool:
    return said == kept or whole_text(said) == kept
