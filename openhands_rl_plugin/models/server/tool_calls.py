"""Hermes-style tool calls in the model's text, as an OpenAI-compatible answer shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from openhands_rl_plugin.core.templates.json_calls import OPEN, parse_tool_call_json
from openhands_rl_plugin.core.types import ToolCall

_OPEN = re.compile(re.escape(OPEN), re.IGNORECASE)


@dataclass(frozen=True)
class ParsedText:
    """The text around the calls without white space at its ends (None when there is none), and the calls.

    ``spoken`` is that text as the model wrote it: what a stream has sent is the beginning of it.
    """

    content: str | None
    calls: tuple[ToolCall, ...]
    spoken: str = ""


def parse_tool_calls(text: str) -> ParsedText:
    """Split an answer into text and calls. If any call is malformed, everything is left as content."""
    parsed = parse_tool_call_json(text)
    if parsed.problems or not parsed.calls:
        return ParsedText(text, (), text)
    spoken = parsed.before + parsed.after
    return ParsedText(spoken.strip() or None, parsed.calls, spoken)


def safe_length(text: str) -> int:
    """How much of an unfinished answer is surely plain content: up to a call or what may become one."""
    if match := _OPEN.search(text):
        return match.start()
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text[-length:].lower() == OPEN[:length]:
            return len(text) - length
    return len(text)
