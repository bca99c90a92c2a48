"""Reads chat messages of OpenAI-like servers, clients and files, and compares them with those of a tree.

Absent, null, empty and ``"null"`` are one thing for arguments and lists of calls, the content of a message with calls,
and usage. Any other content that is the text ``null`` stays: a tool may print it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from pydantic import JsonValue

from openhands_rl_plugin.core.arrays import Floats
from openhands_rl_plugin.core.types import (
    JsonObject,
    Message,
    Node,
    Observation,
    SamplingParams,
    Tokens,
    ToolCall,
    Trajectory,
    Usage,
)

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""The fields of a chat message that hold its reasoning as a text."""
_REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning")  # and OpenRouter's "reasoning.text"
_PART_LISTS = ("thinking_blocks", "reasoning_details", "content")
_TEXTS = ("thinking", "reasoning", "text", "summary", "content")


class SpokenMessage(Message):
    """A message with its reasoning, before it enters or after it leaves a tree. ``sampled``: by the policy."""

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
    for name in REASONING_NAMES:
        if isinstance(given := wire.get(name), str | list) and (text := text_of(given)):
            return text
    for name in _PART_LISTS:
        parts = wire.get(name)
        texts = [_thought(part) for part in _list(parts) if _is_reasoning(part)]
        if text := "\n".join(filter(None, texts)):
            return text
    return None


def _thought(part: Mapping[str, object]) -> str | None:
    found = (text_of(given) for name in _TEXTS if isinstance(given := part.get(name), str | list))
    return next(filter(None, found), None)


def _is_reasoning(part: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(part, Mapping) and str(part.get("type")).partition(".")[0] in _REASONING_PARTS


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def reasoning_of(node: Node) -> str | None:
    """The reasoning that was recorded or imported with a node, or ``None``."""
    return next((text for wire in _wires(node) if (text := reasoning_in(wire)) is not None), None)


def has_reasoning(node: Node) -> bool:
    """Whether a completion had reasoning: in its text, or in a separate field, where it may be encrypted."""
    in_text = re.search("</(?:think|thinking|reasoning)>", node.message.content or "") is not None
    parts = (part for wire in _wires(node) for name in _PART_LISTS for part in _list(wire.get(name)))
    return in_text or any(map(_is_reasoning, parts)) or reasoning_of(node) is not None


def _wires(node: Node) -> Iterator[Mapping[str, object]]:
    """The places of a node that may have the fields of a chat message."""
    held = node.metadata
    for wire in (held, held.get("message"), _first_message(held.get("response"))):
        if isinstance(wire, Mapping):
            yield wire


def _first_message(response: object) -> object:
    choices = response.get("choices") if isinstance(response, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return first.get("message") if isinstance(first, Mapping) else None


WireMessage = Mapping[str, Any]
"""A chat message as a client sends it: content is text or a list of parts."""
_ROLES: Mapping[str, Any] = {"developer": "system", "function": "tool"}
_BUSY = re.compile("rate_?limit|overload|exhaust|unavailable|time_?out|quota|too_?many")
_REFUSED = re.compile(
    "invalid|validation|bad_?request|not_?found|context_?(?:length|window)|auth|permission|forbidden|content_?(?:filter|policy)"
    "|unsupported|unprocessable"
)

RECORDED_PARAMETERS = (
    *SamplingParams.model_fields,
    "max_completion_tokens",
    "n",
    "reasoning_effort",
    "response_format",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
)
"""Recorded fields of a request, besides messages and tools. An allow list, because a request may hold keys."""

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


def recorded_parameters(given: Mapping[str, Any]) -> JsonObject:
    """The sampling parameters of a request that are stored."""
    return {name: given[name] for name in RECORDED_PARAMETERS if given.get(name) is not None}


def sampling_in(given: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a request, unchecked; ``None`` for what is left to the server."""
    stop = given.get("stop") or ()
    return SamplingParams.model_construct(
        temperature=given.get("temperature"),
        top_p=given.get("top_p"),
        **{name: given.get(name) for name in NEUTRAL_PARAMETERS},
        max_tokens=given.get("max_completion_tokens") or given.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=given.get("seed"),
    )


def altering_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters in ``given`` that change the distribution, except the temperature; name -> value."""
    neutral = {"top_p": 1.0, **NEUTRAL_PARAMETERS}
    found = {name: given[name] for name, value in neutral.items() if given.get(name) not in (None, value)}
    return {name: value for name, value in found.items() if (name, value) != ("top_k", 0)}


def to_message(wire: WireMessage) -> Message:
    """The message in whole characters, with its text parts joined by line breaks, as chat templates join them.

    Raises ``ValueError``, ``LookupError``, ``TypeError`` or ``AttributeError`` for another format.
    """
    calls = calls_in(wire)
    made = Message(
        role=_ROLES.get(wire["role"], wire["role"]),
        content=text_in(wire, calls) or (None if calls else ""),
        tool_calls=calls,
        tool_call_id=_identity(wire.get("tool_call_id")),
        name=wire.get("name"),
    )
    return whole_message(made)


def text_in(wire: WireMessage, calls: object) -> str | None:
    """The content of a chat message as text; ``None`` for the text ``null`` of one that has ``calls``."""
    text = text_of(wire.get("content"))
    return None if calls and text == "null" else text


def listed(wire: WireMessage) -> list[Any]:
    """The calls of a chat message, or the pieces of a delta: a list, the same as JSON text, or the former
    ``function_call``. Raises ``ValueError`` for other text."""
    given = wire.get("tool_calls")
    if isinstance(given, str):
        given = json.loads(given.strip() or "null")
    if not given and isinstance(alone := wire.get("function_call"), Mapping):
        given = [{"index": 0, "function": alone}]
    return [call for call in given or () if call]


def calls_in(wire: WireMessage) -> tuple[ToolCall, ...]:
    """The calls of a chat message. Names and arguments are in ``function``, or in the call itself.

    Raises as ``to_message`` does.
    """
    calls = [(call, call.get("function") or call) for call in listed(wire)]
    return tuple(
        ToolCall(
            id=_identity(call.get("id")) or "",
            name=function["name"],
            arguments=function.get("arguments", function.get("parameters")),
        )
        for call, function in calls
        if function.get("name") or function.get("arguments")
    )


def usage_in(given: object) -> Usage:
    """The token counts of one request from the ``usage`` of a completion; what is no count is 0."""
    usage = given if isinstance(given, Mapping) else {}
    details = usage.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, Mapping) else 0,
        calls=1,
    )


def usage_to_wire(usage: Usage) -> JsonObject:
    """The counts as the ``usage`` of a completion."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def finish_in(choice: Mapping[str, object]) -> str | None:
    """The finish reason of a choice, or of a chunk of it; ``None`` while there is none."""
    reason = choice.get("finish_reason")
    return whole_text(reason) if isinstance(reason, str) and reason not in ("", "null") else None


def logprobs_in(choice: Mapping[str, Any], expected: int) -> Floats:
    """One logprob for each sampled id, or nothing."""
    try:
        return Tokens.known_logprobs([float(token["logprob"]) for token in choice["logprobs"]["content"]], expected)
    except (TypeError, LookupError, ValueError):
        return Floats()


def error_in(document: object) -> tuple[int, str] | None:
    """The HTTP status that an error in a body or an event stands for, and its message; ``None`` without an error.

    It stands in ``error``, in a choice, or in the body itself. An unknown code is the server's own failure, 500.
    """
    held = document[0] if isinstance(document, list) and document else document
    if not isinstance(held, Mapping):
        return None
    choices = [choice for choice in _list(held.get("choices")) if isinstance(choice, Mapping)]
    flat = held if not choices and isinstance(held.get("message"), str) else None
    places = (held.get("error"), *(choice.get("error") for choice in choices), flat)
    found = next((each for each in places if each and (not isinstance(each, Mapping) or any(each.values()))), None)
    if found is None and not any(choice.get("finish_reason") == "error" for choice in choices):
        return None
    error = found if isinstance(found, Mapping) else {**held, "message": found or "the answer ended with an error"}
    codes = [str(error.get(name) or "") for name in ("code", "status", "type", "error_type")]
    status = next((int(code[:3]) for code in codes if code[:3].isdecimal() and 400 <= int(code[:3]) < 600), 0)
    if not status:
        words = " ".join(codes).lower()
        status = 429 if _BUSY.search(words) else 400 if _REFUSED.search(words) else 500
    return status, " ".join(str(error.get("message") or found).split())[:300]


def _count(value: object) -> int:
    return int(value) if isinstance(value, int | float) and 0 <= value < 2**63 else 0


def _identity(value: object) -> Any:
    """Some servers and files number their calls."""
    return str(value) if isinstance(value, int) else value


def to_wire(message: Message) -> dict[str, Any]:
    """The message as an OpenAI chat message."""
    calls = wire_calls(message.tool_calls) or None
    optional = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "name": message.name}
    shown = {name: value for name, value in optional.items() if value is not None}
    return {"role": message.role, "content": message.content, **shown}


def wire_calls(calls: Sequence[ToolCall]) -> list[JsonValue]:
    """The calls as the ``tool_calls`` of an OpenAI chat message."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def text_of(content: object) -> str | None:
    """Content as plain text, without reasoning; another part that is no text (an image) is named in brackets.

    What is neither text nor parts, such as the object that a tool returned, is written as JSON.
    """
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    if not all(_is_part(part, alone=parts is not content) for part in parts):
        return json.dumps(content, ensure_ascii=False)
    spoken = [part for part in parts if not _is_reasoning(part)]
    if parts and not spoken:
        return None
    return "\n".join(text for part in spoken if (text := _part_text(part)) is not None)


def _is_part(part: object, *, alone: bool) -> bool:
    if not isinstance(part, Mapping):
        return not alone and isinstance(part, str | None)
    kind = part.get("type")
    return kind == "text" or _is_reasoning(part) or (not alone and (isinstance(kind, str) or "text" in part))


def _part_text(part: object) -> str | None:
    if not isinstance(part, Mapping):
        return None if part is None else str(part)
    kind, text = part.get("type"), part.get("text")
    return f"[{kind}]" if kind != "text" and not isinstance(text, str) else None if text is None else str(text)


def equals(wire: WireMessage, message: Message) -> bool:
    """Whether both are one message. Hot: called for every message of every prompt, so it builds nothing."""
    if wire["role"] != message.role or wire.get("tool_call_id") != message.tool_call_id:
        return False
    sent, kept = text_in(wire, message.tool_calls), message.content
    if sent != kept and not _same(sent or "", kept or ""):
        return False
    if not wire.get("tool_calls") and not wire.get("function_call"):
        return not message.tool_calls
    own_calls = message.tool_calls
    if wire.get("tool_calls") == wire_calls(own_calls):
        return True
    calls = calls_in(wire)
    return len(calls) == len(own_calls) and all(
        call.id == own.id and call.name == own.name and _same(call.arguments, own.arguments)
        for call, own in zip(calls, own_calls, strict=True)
    )


def json_object(value: object) -> JsonObject:
    """``value`` where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


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


def _same(sent: str, kept: str) -> bool:
    return sent == kept or whole_text(sent) == kept


# Control characters except for tab and line feed, and what turns the direction of writing.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def transcript(trajectory: Trajectory) -> tuple[Message, ...]:
    """Every message once, in order. Without a rewritten history it is ``trajectory.messages()``."""
    return tuple(trajectory.nodes[at].message for at in transcript_nodes(trajectory))


def transcript_nodes(trajectory: Trajectory) -> Sequence[int]:
    """The nodes of ``transcript``. What a rewritten history repeats of the history before is left out: of the messages
    before its first answer those that stood there, in that order. Whatever else is there twice, such as two equal
    observations, stays."""
    shown: set[int] = set()
    before: Sequence[int] = ()
    for end in trajectory.ends():
        path = trajectory.path(end)
        shown.update(_new(trajectory.nodes, path, before) - shown)
        before = path
    return sorted(shown)


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
