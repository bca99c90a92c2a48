"""Hermes-style tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in the model's text."""

import json
from dataclasses import dataclass

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True)
class ParsedCall:
    """A call as the model wrote it; `arguments` is the JSON text cut out of its answer, not re-serialised."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedText:
    """The text before the first call (None when there is none) and the calls."""

    content: str | None
    calls: tuple[ParsedCall, ...]


def parse_tool_calls(text: str) -> ParsedText:
    """Split an answer into text and calls. If any call is malformed, everything is left as content."""
    start = text.find(OPEN)
    if start < 0:
        return ParsedText(text, ())
    calls: list[ParsedCall] = []
    rest = text[start:]
    while (begin := rest.find(OPEN)) >= 0:
        body, _, rest = rest[begin + len(OPEN) :].partition(CLOSE)
        call = _parse_call(body)
        if call is None:
            return ParsedText(text, ())
        calls.append(call)
    return ParsedText(text[:start].strip() or None, tuple(calls))


def render_tool_call(name: str, arguments: str) -> str:
    """The text that `parse_tool_calls` reads back; `arguments` is JSON text and stays as it is."""
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{CLOSE}'


def safe_length(text: str) -> int:
    """How much of an unfinished answer is surely plain content: up to a call or what may become one."""
    start = text.find(OPEN)
    if start >= 0:
        return start
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:length]):
            return len(text) - length
    return len(text)


def _parse_call(body: str) -> ParsedCall | None:
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        return ParsedCall(call["name"], arguments) if _is_object(arguments) else None
    if not isinstance(arguments, dict):
        return None
    return ParsedCall(call["name"], _raw_arguments(body, arguments))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _raw_arguments(body: str, arguments: dict[str, object]) -> str:
    """The arguments' own text inside the call; re-serialised only where it cannot be found unambiguously."""
    decoder = json.JSONDecoder()
    at = body.find('"arguments"')
    while at >= 0:
        colon = at + len('"arguments"')
        value = body[colon:].lstrip()
        if value.startswith(":"):
            value = value[1:].lstrip()
            try:
                parsed, end = decoder.raw_decode(value)
            except ValueError:
                parsed, end = None, 0
            if parsed == arguments:
                return value[:end]
        at = body.find('"arguments"', colon)
    return json.dumps(arguments, ensure_ascii=False)
