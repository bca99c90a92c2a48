"""Parses one action from a model's text. Nothing here raises: errors are returned as values."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_ACTION_CHARACTERS = 8192

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
_FENCE = re.compile(r"```\w*")

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


def parse_react(text: str | None) -> ParsedAction:
    """Read ``Thought: ... / Action: ...``: the last ``Action:`` line wins, and only its first line of text counts.

    An action on the line below ``Action:``, code fences, backticks and trailing stop tokens are tolerated.
    """
    lines = _lines(text)
    found = None
    for at, line in enumerate(lines):
        if match := _ACTION_LINE.match(line):
            found = at, match["rest"]
    if found is None:
        return ParsedAction(None, _NO_ACTION, thought="\n".join(lines).strip())
    at, rest = found
    thought = _without_label("\n".join(lines[:at]))
    action = next((cleaned for line in (rest, *lines[at + 1 :]) if (cleaned := _clean(line))), "")
    return _bounded(action, _EMPTY_ACTION, thought)


def parse_plain(text: str | None) -> ParsedAction:
    """Take the whole answer as the action, without code fences and trailing stop tokens."""
    lines = [line for line in _lines(_without_stop_tokens(text or "")) if not _FENCE.fullmatch(line.strip())]
    return _bounded(_clean("\n".join(lines)), _EMPTY_ANSWER, "")


def _bounded(action: str, if_empty: str, thought: str) -> ParsedAction:
    if not action:
        return ParsedAction(None, if_empty, thought)
    if len(action) > MAX_ACTION_CHARACTERS:
        return ParsedAction(None, _LONG_ACTION, thought)
    return ParsedAction(action, None, thought)


def _lines(text: str | None) -> list[str]:
    return (text or "").replace("\r\n", "\n").split("\n")


def _clean(text: str) -> str:
    """Strip white space, stop tokens and a fence or backticks around the action."""
    text = _without_stop_tokens(text)
    if text.startswith("```"):
        text = text.removeprefix("```").removesuffix("```") if text.count("```") > 1 else _FENCE.sub("", text, count=1)
    if len(text) > 1 and text[0] == text[-1] == "`":
        text = text.strip("`")
    return text.strip()


def _without_stop_tokens(text: str) -> str:
    text = text.strip()
    while (stop := next((token for token in _STOP_TOKENS if text.endswith(token)), None)) is not None:
        text = text[: -len(stop)].rstrip()
    return text


def _without_label(thought: str) -> str:
    thought = thought.strip()
    return thought[len("thought:") :].strip() if thought.lower().startswith("thought:") else thought
