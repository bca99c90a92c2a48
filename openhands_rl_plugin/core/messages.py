"""Where the reasoning of an answer stands: beside its content, under one of several names, or among its parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.function_text import read_function_text
from openhands_rl_plugin.core.types import Message, Node, Observation, ToolCall, Trajectory

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


FINISH = "finish"
"""The name of OpenHands' tool that ends an episode; its ``message`` is the answer."""

# Control characters except for tab and line feed, and what turns the direction of writing.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def transcript(trajectory: Trajectory) -> tuple[Message, ...]:
    """Every message once, in order. Without a rewritten history it is ``trajectory.messages()``."""
    return tuple(trajectory.nodes[at].message for at in transcript_nodes(trajectory))


def transcript_nodes(trajectory: Trajectory) -> Sequence[int]:
    """The nodes of ``transcript``. What a rewritten history repeats of the history before is left out: of the messages
    before its first answer those that stood there, in that order. Whatever else is said twice, such as two equal
    observations, stays."""
    told: set[int] = set()
    before: Sequence[int] = ()
    for end in trajectory.ends():
        path = trajectory.path(end)
        told.update(_new(trajectory.nodes, path, before) - told)
        before = path
    return sorted(told)


def _new(nodes: Sequence[Node], path: Sequence[int], before: Sequence[int]) -> set[int]:
    """The nodes of ``path`` that do not repeat those of the path ``before``."""
    known = set(before)
    own = [at for at in path if at not in known]
    answer = next((number for number, at in enumerate(own) if nodes[at].sampled), len(own))
    shared = set(path)
    left = [nodes[at] for at in before if at not in shared]
    new = own[answer:]
    for at in own[:answer]:
        message = nodes[at].message
        same = next((number for number, old in enumerate(left) if message in (old.message, _replayed(old))), None)
        if same is None:
            new.append(at)
        else:
            left = left[same + 1 :]
    return set(new)


def _replayed(node: Node) -> Message:
    """The message in the form in which its host repeats it."""
    form = node.metadata.get("replayed_as")
    return Message.model_validate(form) if isinstance(form, dict) else node.message


def last_answer(trajectory: Trajectory) -> str | None:
    """What the agent said last: the message of its ``finish``, also of one in the text, or a reply without a call.

    ``None`` where it said nothing, or where its last message is another call.
    """
    last = next((each for each in reversed(trajectory.messages()) if each.role == "assistant"), None)
    if last is None:
        return None
    if last.tool_calls:
        return _finish_message(last.tool_calls)
    parsed = read_function_text(last.content or "")
    return _finish_message(parsed.calls) if parsed.calls else last.content


def _finish_message(calls: Sequence[ToolCall]) -> str | None:
    said = next((call.arguments for call in calls if call.name == FINISH), None)
    try:
        given = json.loads(said) if said is not None else None
    except (ValueError, RecursionError):
        return None
    message = given.get("message") if isinstance(given, dict) else None
    return message if isinstance(message, str) else None


def visible(text: str) -> str:
    r"""``text`` with everything that a terminal would act upon written out: ESC is ``\x1b``."""
    return _UNSAFE.sub(_written_out, text)


def one_line(text: str, width: int) -> str:
    """``text`` in one line of at most ``width`` characters, with ``…`` where it was cut."""
    line = " ".join(visible(text[: 4 * width]).split())
    return line if len(line) <= width and len(text) <= 4 * width else f"{line[: width - 1]}…"


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def counted(count: int, what: str) -> str:
    """``(1, "task")`` -> ``"1 task"``, ``(2, "task")`` -> ``"2 tasks"``."""
    return f"{count} {what}{'' if count == 1 else 's'}"
