"""Parses one action from a model's text. Nothing here raises: errors are returned as values."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any, NamedTuple

# Emphasis and numbers around the words ("**Action:**", "Action 2:") are common in what chat models write.
_ACTION_LINE = re.compile(r"[ \t>*#_-]{0,16}action[ \t]{0,4}\d{0,4}[*_]{0,3}[ \t]{0,4}:[*_]{0,3}", re.IGNORECASE)
_FENCE = re.compile(r"[ \t]{0,3}(?P<marks>`{3,})[^`\n]*")
# What a model goes on to make up after its action, in the form of the conversation.
_MADE_UP = re.compile(r"[ \t>*_-]{0,16}observation[ \t]{0,4}\d{0,4}[*_]{0,3}[ \t]{0,4}:", re.IGNORECASE)

_NO_ACTION = (
    "Invalid action: there is no line that starts with 'Action:'. Answer in this form:\nThought: <your reasoning>\n"
    "Action: <one action>"
)
_EMPTY = "Invalid action: it is empty. Answer with one action."
_SEVERAL_FENCES = "Invalid action: several code fences are below 'Action:'. Write one, between ```` if it holds ```."


class ParsedAction(NamedTuple):
    """Either an ``action`` to execute, most often a text, or an ``error`` for the model."""

    action: Any
    error: str | None


def parse_react(text: str | None) -> ParsedAction:
    """Read ``Thought: ... / Action: ...``: all that follows the last ``Action:`` is the action.

    Where it begins with a code fence, the action is what the fence holds; a second fence below is an error. An
    ``Action:`` inside a fence counts only where there is none outside. A made-up ``Observation:`` below the action and
    backticks around it are left out.
    """
    lines, marks, last = (text or "").strip().replace("\r\n", "\n").split("\n"), "", dict[bool, int]()
    for at, line in enumerate(lines):
        if _ACTION_LINE.match(line):
            last[bool(marks)] = at
        if marks:
            marks = "" if _closes(line, marks) else marks
        elif fence := _FENCE.fullmatch(line):
            marks = fence["marks"]
    if not last:
        return ParsedAction(None, _NO_ACTION)
    at = last.get(False, max(last.values()))
    below = [_ACTION_LINE.sub("", lines[at], count=1), *lines[at + 1 :]]
    if False not in last:  # the whole answer stands in a fence
        below = [*takewhile(lambda line: not _closes(line, "```"), below)]
    action, behind = _unwrapped("\n".join(below).strip())
    if behind is None:
        below = [below[0], *takewhile(lambda line: not _MADE_UP.match(line), below[1:])]
        action, _ = _unwrapped("\n".join(below).strip())
    elif any(map(_FENCE.fullmatch, behind)):
        return ParsedAction(None, _SEVERAL_FENCES)
    return ParsedAction(action, None) if action else ParsedAction(None, _EMPTY)


def parse_plain(text: str | None) -> ParsedAction:
    """Take the whole answer as the action, without a fence around all of it."""
    whole = (text or "").strip().replace("\r\n", "\n")
    action, behind = _unwrapped(whole)
    action = whole if any(map(str.strip, behind or ())) else action
    return ParsedAction(action, None) if action else ParsedAction(None, _EMPTY)


def _unwrapped(action: str) -> tuple[str, list[str] | None]:
    """The text in the fence that an action begins with, and the lines behind that fence; else the action without the
    backticks of inline code around it, and ``None``.
    """
    first, *lines = action.split("\n")
    if fence := _FENCE.fullmatch(first):
        inside = [*takewhile(lambda line: not _closes(line, fence["marks"]), lines)]
        text = "\n".join(inside).strip("\n").rstrip()
        return (text if "\n" in text else text.strip()), lines[len(inside) + 1 :]
    marks = len(action) - len(action.lstrip("`"))
    if marks and len(action) > 2 * marks and action.endswith("`" * marks) and "`" not in action[marks:-marks]:
        return action[marks:-marks].strip(), None
    return action, None


def _closes(line: str, marks: str) -> bool:
    line = line.strip()
    return len(line) >= len(marks) and not line.strip("`")
