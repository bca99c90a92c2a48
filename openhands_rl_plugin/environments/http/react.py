"""Parses one action from a model's text. Nothing here raises: errors are returned as values."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_ACTION_CHARACTERS = 65_536

_STOP_TOKENS = (
    "</s>",
    "<eos>",
    "<|end|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
)
# Emphasis and numbers around the words ("**Action:**", "Action 2:") are common in what chat models write.
_ACTION_LINE = re.compile(
    r"[ \t>*#_-]{0,16}action[ \t]{0,4}\d{0,4}[*_]{0,3}[ \t]{0,4}:[*_]{0,3}(?P<rest>.*)", re.IGNORECASE
)
_FENCE = re.compile(r"[ \t]{0,3}(?P<marks>`{3,})[^`\n]*")
# What a model goes on to make up after its action, in the form of the conversation.
_MADE_UP = re.compile(r"[ \t>*#_-]{0,16}observation[ \t]{0,4}\d{0,4}[*_]{0,3}[ \t]{0,4}:", re.IGNORECASE)

_NO_ACTION = (
    "Invalid action: there is no line that starts with 'Action:'. Answer in this form:\nThought: <your reasoning>\n"
    "Action: <one action>"
)
_EMPTY_ACTION = "Invalid action: the 'Action:' line is empty. Write the action after it."
_EMPTY_ANSWER = "Invalid action: the answer is empty. Answer with one action."
_LONG_ACTION = f"Invalid action: it is longer than {MAX_ACTION_CHARACTERS} characters. Write a shorter one."


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """Either an ``action`` to execute, or an ``error`` for the model; ``thought`` is the text before the action."""

    action: str | None
    error: str | None
    thought: str = ""


def parse_react(text: str | None, *, unwrap: bool = True) -> ParsedAction:
    """Read ``Thought: ... / Action: ...``: all that follows the last ``Action:`` is the action.

    Where it begins with a code fence, the action is what the fence holds. An ``Action:`` inside a fence counts only
    where there is none outside. A made-up ``Observation:`` below the action, backticks around it and trailing stop
    tokens are left out. ``unwrap`` of false keeps fences and backticks, for graders that look for them.
    """
    lines = _lines(_without_stop_tokens(text or ""))
    fenced = _fenced(lines)
    matches = [(at, match) for at, line in enumerate(lines) if (match := _ACTION_LINE.match(line))]
    found = next((each for each in reversed(matches) if not fenced[each[0]]), matches[-1] if matches else None)
    if found is None:
        return ParsedAction(None, _NO_ACTION, thought="\n".join(lines).strip())
    at, match = found
    below = [match["rest"], *lines[at + 1 :]]
    if fenced[at]:
        below = _up_to_fence(below)  # the whole answer stands in a fence
    inside = _fenced(below)
    end = next((end for end, line in enumerate(below) if end and not inside[end] and _MADE_UP.match(line)), len(below))
    action = "\n".join(below[:end]).strip()
    return _bounded(_clean(action) if unwrap else action, _EMPTY_ACTION, _without_label("\n".join(lines[:at])))


def parse_plain(text: str | None, *, unwrap: bool = True) -> ParsedAction:
    """Take the whole answer as the action, without trailing stop tokens and without a fence around all of it."""
    text = _without_stop_tokens(text or "").replace("\r\n", "\n")
    return _bounded(_clean(text, whole=True) if unwrap else text, _EMPTY_ANSWER, "")


def _bounded(action: str, if_empty: str, thought: str) -> ParsedAction:
    if not action:
        return ParsedAction(None, if_empty, thought)
    if len(action) > MAX_ACTION_CHARACTERS:
        return ParsedAction(None, _LONG_ACTION, thought)
    return ParsedAction(action, None, thought)


def _lines(text: str | None) -> list[str]:
    return (text or "").replace("\r\n", "\n").split("\n")


def _clean(text: str, *, whole: bool = False) -> str:
    """Without a fence or backticks around the action; ``whole``: a fence with text below it belongs to the action."""
    lines = _lines(text)
    if (opening := _FENCE.fullmatch(lines[0])) is not None:
        inside = _up_to_fence(lines[1:], opening["marks"])
        if not (whole and any(line.strip() for line in lines[len(inside) + 2 :])):
            return "\n".join(inside).strip("\n").rstrip() if len(inside) > 1 else _unquoted("".join(inside))
    return _unquoted(text)


def _unquoted(text: str) -> str:
    """Without the backticks of inline code around it, such as those of a fence that opens and closes in one line."""
    text = text.strip()
    marks = len(text) - len(text.lstrip("`"))
    if marks and len(text) > 2 * marks and text.endswith("`" * marks) and "`" not in text[marks:-marks]:
        return text[marks:-marks].strip()
    return text


def _fenced(lines: list[str]) -> list[bool]:
    """Which lines stand inside a closed fence, its marks included. A fence that nothing closes is none."""
    inside, start, marks = [False] * len(lines), 0, ""
    for at, line in enumerate(lines):
        if marks and _closes(line, marks):
            inside[start : at + 1] = [True] * (at + 1 - start)
            marks = ""
        elif not marks and (opening := _FENCE.fullmatch(line)) is not None:
            start, marks = at, opening["marks"]
    return inside


def _up_to_fence(lines: list[str], marks: str = "```") -> list[str]:
    """The lines before the one that closes a fence opened by ``marks``; all of them where none does."""
    return lines[: next((at for at, line in enumerate(lines) if _closes(line, marks)), len(lines))]


def _closes(line: str, marks: str) -> bool:
    line = line.strip()
    return len(line) >= len(marks) and not line.strip("`")


def _without_stop_tokens(text: str) -> str:
    text = text.strip()
    while (stop := next((token for token in _STOP_TOKENS if text.endswith(token)), None)) is not None:
        text = text[: -len(stop)].rstrip()
    return text


def _without_label(thought: str) -> str:
    thought = thought.strip()
    return thought[len("thought:") :].strip() if thought.lower().startswith("thought:") else thought
