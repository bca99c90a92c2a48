"""Parses one action from a model's text. Nothing here raises: errors are returned as values."""

from __future__ import annotations

import math
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
# One "#" begins a comment in code.
_MADE_UP = re.compile(
    r"[ \t>*_-]{0,16}(?:#{2,6}[ \t]{0,4})?[*_]{0,3}observation[ \t]{0,4}\d{0,4}[*_]{0,3}[ \t]{0,4}:", re.IGNORECASE
)
# What a line of code opens and a later line closes: until then, neither fences nor labels mean anything.
_HEREDOC = re.compile(r"(?<!<)<<-?[ \t]{0,4}\\?[\"']?(?P<word>[A-Za-z_]\w{0,63})[\"']?")
_QUOTES = ('"""', "'''")
_DOCUMENTS = frozenset({"md", "markdown"})

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
_CUT = (
    "Invalid action: a line of it begins with 'Observation:', where it would have been cut, so nothing was executed. "
    "Put the action into a code fence."
)


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """Either an ``action`` to execute, or an ``error`` for the model; ``thought`` is the text before the action."""

    action: str | None
    error: str | None
    thought: str = ""


def parse_react(text: str | None, *, unwrap: bool = True) -> ParsedAction:
    """Read ``Thought: ... / Action: ...``: all that follows the last ``Action:`` is the action.

    Where it begins with a code fence, the action is what the fence holds; a second fence below is an error. Fences in
    heredocs, strings of three quotes and documents are text. An ``Action:`` inside a fence counts only where there is
    none outside. A made-up ``Observation:`` below the action, backticks around it and trailing stop
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
    inside, texts = _fenced(below), _texts(below)
    end = next(
        (at for at, line in enumerate(below) if at and not (inside[at] or texts[at]) and _MADE_UP.match(line)),
        len(below),
    )
    action = "\n".join(below[:end]).strip()
    if unwrap and (error := _ambiguous(_lines(action), end < len(below))) is not None:
        return ParsedAction(None, error, _without_label("\n".join(lines[: found[0]])))
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
        end = _closing(lines, 0, opening["marks"], _texts(lines))
        inside = lines[1:] if end is None else lines[1:end]
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
    inside, texts, at = [False] * len(lines), _texts(lines), 0
    unclosed = math.inf  # fences of so many marks and more are not closed any more
    while at < len(lines):
        opening = _FENCE.fullmatch(lines[at])
        if opening is not None and len(opening["marks"]) < unclosed:
            if (end := _closing(lines, at, opening["marks"], texts)) is not None:
                inside[at : end + 1] = [True] * (end + 1 - at)
                at = end
            else:
                unclosed = len(opening["marks"])
        at += 1
    return inside


def _closing(lines: list[str], start: int, marks: str, texts: list[bool]) -> int | None:
    """The line that closes the fence which begins at ``start``. A fence with a language inside opens another."""
    depth, last = 1, None
    document = lines[start].strip().strip("`").strip().lower() in _DOCUMENTS
    for at in range(start + 1, len(lines)):
        if texts[at]:
            continue
        if _closes(lines[at], marks):
            depth, last = depth - 1, at
            if not depth and not document:
                return at
        elif document and _MADE_UP.match(lines[at]) and last is not None:
            break
        elif (inner := _FENCE.fullmatch(lines[at])) is not None and inner["marks"] == marks:
            depth += 1
    return last


def _texts(lines: list[str]) -> list[bool]:
    """Which lines stand in a heredoc or in a string of three quotes that a later line ends; that line is one, too."""
    inside, at = [False] * len(lines), 0
    ends = {line.strip(): at for at, line in enumerate(lines)}
    last = {quotes: max((at for at, line in enumerate(lines) if quotes in line), default=-1) for quotes in _QUOTES}
    while at < len(lines):
        end, line = at, lines[at]
        heredoc = _HEREDOC.search(line)
        if heredoc is not None and ends.get(heredoc["word"], -1) > at:
            end = next(to for to in range(at + 1, len(lines)) if lines[to].strip() == heredoc["word"])
        elif quotes := next((each for each in _QUOTES if line.count(each) % 2 and last[each] > at), None):
            end = next(to for to in range(at + 1, len(lines)) if quotes in lines[to])
        inside[at + 1 : end + 1] = [True] * (end - at)
        at = end + 1
    return inside


def _ambiguous(lines: list[str], cut: bool) -> str | None:
    """What to tell the model where a part of its action would be lost; ``cut``: before a made-up observation."""
    texts = _texts(lines)
    if (opening := _FENCE.fullmatch(lines[0])) is not None:
        end = _closing(lines, 0, opening["marks"], texts)
        below = lines[end + 1 :] if end is not None else []
        return _SEVERAL_FENCES if any(_FENCE.fullmatch(line) for line in below) else None
    if not cut:
        return None
    ends = {line.strip() for line in lines}
    opened = (heredoc["word"] for line in lines if (heredoc := _HEREDOC.search(line)) is not None)
    text = "\n".join(lines)
    return (
        _CUT
        if (any(word not in ends for word in opened) or any(text.count(quotes) % 2 for quotes in (*_QUOTES, '"')))
        else None
    )


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
