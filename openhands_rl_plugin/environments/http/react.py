"""Parses one action from a model's text. Nothing here raises: errors are returned as values."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

MAX_ACTION_CHARACTERS = 65_536

_STOP_TOKENS = (
    *("</s>", "<eos>", "<|end|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
)
# Emphasis and numbers around the words ("**Action:**", "Action 2:") are common in what chat models write.
_ACTION_LINE = re.compile(
    r"[ \t>*#_-]{0,16}action[ \t]{0,4}\d{0,4}[*_]{0,3}[ \t]{0,4}:[*_]{0,3}(?P<rest>.*)", re.IGNORECASE
)
_FENCE = re.compile(r"[ \t]{0,3}(?P<marks>`{3,})[^`\n]*")
# What a model goes on to make up after its action, in the form of the conversation.
# One "#" begins a comment in code.
_MADE_UP = re.compile(
    r"[ \t>*_-]{0,16}(?:#{2,6}[ \t]{0,4})?[*_]{0,3}observation[ \t]{0,4}\d{0,4}[*_]{0,3}[ \t]{0,4}:", re.IGNORECASE
)

_NO_ACTION = (
    "Invalid action: there is no line that starts with 'Action:'. Answer in this form:\nThought: <your reasoning>\n"
    "Action: <one action>"
)
_EMPTY_ACTION = "Invalid action: the 'Action:' line is empty. Write the action after it."
_EMPTY_ANSWER = "Invalid action: the answer is empty. Answer with one action."
_LONG_ACTION = f"Invalid action: it is longer than {MAX_ACTION_CHARACTERS} characters. Write a shorter one."
_SEVERAL_FENCES = (
    "Invalid action: there are several code fences below 'Action:', and nothing was executed. Write one action in one "
    "fence; if the action itself holds lines of ```, put it between lines of ````."
)


class ParsedAction(NamedTuple):
    """Either an ``action`` to execute, most often a text, or an ``error`` for the model."""

    action: Any
    error: str | None


def parse_react(text: str | None, *, unwrap: bool = True) -> ParsedAction:
    """Read ``Thought: ... / Action: ...``: all that follows the last ``Action:`` is the action.

    Where it begins with a code fence, the action is what the fence holds; a second fence below is an error. An
    ``Action:`` inside a fence counts only where there is none outside. A made-up ``Observation:`` below the action,
    backticks around it and trailing stop tokens are left out. ``unwrap`` of false keeps fences and backticks, for
    graders that look for them.
    """
    lines = _lines(text)
    matches = [(at, match) for at, line in enumerate(lines) if (match := _ACTION_LINE.match(line))]
    if not matches:
        return ParsedAction(None, _NO_ACTION)
    fenced = _fenced(lines)
    outside = [each for each in matches if not fenced[each[0]]]
    at, match = (outside or matches)[-1]
    below = [match["rest"], *lines[at + 1 :]]
    if not outside:  # the whole answer stands in a fence
        below = below[: next((at for at, line in enumerate(below) if _closes(line, "```")), None)]
    fenced = _fenced(below)
    made_up = (at for at, line in enumerate(below) if at and not fenced[at] and _MADE_UP.match(line))
    action = "\n".join(below[: next(made_up, None)]).strip()
    inside, after = _split(action)
    if unwrap and inside is not None and any(map(_FENCE.fullmatch, after)):
        return ParsedAction(None, _SEVERAL_FENCES)
    return _bounded(_unwrapped(action, inside) if unwrap else action, _EMPTY_ACTION)


def parse_plain(text: str | None, *, unwrap: bool = True) -> ParsedAction:
    """Take the whole answer as the action, without trailing stop tokens and without a fence around all of it."""
    action = "\n".join(_lines(text))
    inside, after = _split(action)
    if any(line.strip() for line in after):
        inside = None
    return _bounded(_unwrapped(action, inside) if unwrap else action, _EMPTY_ANSWER)


def _bounded(action: str, if_empty: str) -> ParsedAction:
    if not action:
        return ParsedAction(None, if_empty)
    return ParsedAction(action, None) if len(action) <= MAX_ACTION_CHARACTERS else ParsedAction(None, _LONG_ACTION)


def _lines(text: str | None) -> list[str]:
    text = (text or "").strip()
    while (stop := next(filter(text.endswith, _STOP_TOKENS), None)) is not None:
        text = text[: -len(stop)].rstrip()
    return text.replace("\r\n", "\n").split("\n")


def _split(action: str) -> tuple[list[str] | None, list[str]]:
    """The lines in the fence that an action begins with, ``None`` where it begins with none, and those behind it."""
    lines = action.split("\n")
    if (opening := _FENCE.fullmatch(lines[0])) is None:
        return None, []
    end = _closing(lines, 0, opening["marks"])
    return (lines[1:], []) if end is None else (lines[1:end], lines[end + 1 :])


def _unwrapped(action: str, inside: list[str] | None) -> str:
    """``inside``, else the action without the backticks of inline code around it."""
    if inside is not None and len(inside) > 1:
        return "\n".join(inside).strip("\n").rstrip()
    text = "".join(inside).strip() if inside is not None else action.strip()
    marks = len(text) - len(text.lstrip("`"))
    if marks and len(text) > 2 * marks and text.endswith("`" * marks) and "`" not in text[marks:-marks]:
        return text[marks:-marks].strip()
    return text


def _fenced(lines: list[str]) -> list[bool]:
    """Which lines stand inside a closed fence, its marks included. A fence that nothing closes is none."""
    inside, at = [False] * len(lines), 0
    unclosed = math.inf  # fences of so many marks and more are not closed any more
    while at < len(lines):
        opening = _FENCE.fullmatch(lines[at])
        if opening is not None and len(opening["marks"]) < unclosed:
            if (end := _closing(lines, at, opening["marks"])) is not None:
                inside[at : end + 1] = [True] * (end + 1 - at)
                at = end
            else:
                unclosed = len(opening["marks"])
        at += 1
    return inside


def _closing(lines: list[str], start: int, marks: str) -> int | None:
    return next((at for at in range(start + 1, len(lines)) if _closes(lines[at], marks)), None)


def _closes(line: str, marks: str) -> bool:
    line = line.strip()
    return len(line) >= len(marks) and not line.strip("`")
