"""Calls in the text of an answer, by families of models: JSON objects between ``<tool_call>`` tags, or bare.

Strict JSON is a call; what is not is a problem, whose message is for the model. Nothing here raises on a model's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import NamedTuple

from pydantic import JsonValue
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.types import JsonObject, ToolCall


class RenderError(RLError):
    """A call or a conversation cannot be written in the wanted form."""


class ParsedAnswer(NamedTuple):
    """An answer taken apart. Every call that the model began is in ``calls`` or has a message in ``problems``.

    ``before`` is all text ahead of the first of them (with the thought, as the model wrote it) and ``after`` all other
    text that belongs to none. ``thought`` is what stood in ``<think>``.
    """

    before: str
    calls: tuple[ToolCall, ...] = ()
    after: str = ""
    problems: tuple[str, ...] = ()
    thought: str = ""


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls. ``begin`` and ``resume`` are patterns: of what a call begins with, and of where the
    text goes on behind a malformed one. ``end`` stands behind the object; ``example`` is for a model's eyes.
    """

    begin: str
    resume: str
    end: str
    example: str


TAGGED = CallForm(
    r"<tool_call>|<tool_?c?a?l?l?\Z",  # the end may cut it
    r"</tool_call>|(?=<tool_call>|</?think>)",
    "</tool_call>",
    'Write <tool_call>{"name": "...", "arguments": {...}}</tool_call> with strict JSON in it',
)
BARE = CallForm(
    r'<\|python_tag\|>|(?=\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?+["\']name["\']\s*+:)',
    r"(?=<\|python_tag\|>|</?think>)",
    "",
    'Write {"name": "...", "parameters": {...}} in strict JSON and nothing else',
)


def _members(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    if len(members := dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return members


_DECODER = json.JSONDecoder(object_pairs_hook=_members)
_SPACE = re.compile(r"\s*+")
_MEMBER = re.compile(r'\s*+[{,]\s*+("(?:[^"\\]|\\.)*+")\s*+:\s*+', re.DOTALL)
_FENCED = re.compile(r"\s*+```(?:json)?\s*+(?=\{)", re.IGNORECASE)
_ARGUMENTS = ("arguments", "parameters")


def render_tool_call(call: ToolCall) -> str:
    """The call between tags; its arguments stay as they are."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments}}}\n</tool_call>'


def parse_calls(text: str, tools: Sequence[JsonObject] = (), form: CallForm = TAGGED) -> ParsedAnswer:
    """Take an answer apart. One without tags that is a fenced object, naming one of ``tools``, is its call."""
    begin = re.compile(f"</?think>|{form.begin}", re.IGNORECASE)
    last_arguments = max(text.rfind(quote + name + quote) for name in _ARGUMENTS for quote in "\"'")
    found: list[tuple[int, int, ToolCall | str]] = []
    thoughts: list[str] = []
    at = thought_until = 0
    thinking: int | None = None
    while tag := begin.search(text, at):
        start, at = tag.span()
        if tag[0].lower() == "<think>":
            thinking = at if thinking is None else thinking
        elif tag[0].lower() == "</think>":
            if thinking is None and not thoughts:
                thinking, found = 0, []  # the prompt opened this thought
            thoughts += [] if thinking is None else [text[thinking:start]]
            thinking, thought_until = None, at
        elif thinking is not None or (not tag[0] and last_arguments < at and text[:start].strip()):
            at += not tag[0]  # it is no call
        else:
            at, call = _read(text, at, form, bare=not tag[0])
            found += [(start, at, call)] if call else []
    if thinking is not None:
        thoughts.append(text[thinking:])
        thought_until = len(text)
    if tools and not found and form is TAGGED and (fence := _FENCED.match(text)):
        end, call = _read(text, fence.end(), BARE, bare=True)
        offered = [function for tool in tools if isinstance(function := tool.get("function", tool), dict)]
        if isinstance(call, ToolCall) and text[end:].strip() == "```" and call.name in [x.get("name") for x in offered]:
            found = [(0, len(text), call)]
    problems = [each for *_, each in found if isinstance(each, str)]
    # A model that only thought of a call did not mean its thought to be the answer.
    if not found and not text[thought_until:].strip() and re.search(form.begin, "\n".join(thoughts), re.IGNORECASE):
        problems.append("The call was not executed: it stands inside <think>. Write calls after </think>.")
    edges = [0, *(edge for start, end, _ in found for edge in (start, end)), len(text)]
    before, *others = (text[one:other] for one, other in batched(edges, 2))
    calls = tuple(each for *_, each in found if isinstance(each, ToolCall))
    return ParsedAnswer(before, calls, "".join(others), tuple(problems), "\n".join(map(str.strip, thoughts)))


def _read(text: str, at: int, form: CallForm, *, bare: bool) -> tuple[int, ToolCall | str | None]:
    """Where the call at ``at`` ends, and the call, or what is wrong with it; ``None`` for another ``bare`` object."""
    at = _behind_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
        from_json(text[at:end].encode(), allow_inf_nan=False)  # stricter, and less deep
        key = next((each for each in _ARGUMENTS if isinstance(value, dict) and each in value), None)
        if key is None and bare:
            return end, None
        name = value.get("name") if key else None
        if not isinstance(name, str) or not name or not isinstance(value[key], dict):
            raise ValueError('a call needs a "name" and an object of "arguments"')
        behind = _behind_space(text, end)
        closing = text[behind : behind + len(form.end)]
        if not form.end.startswith(closing.lower()):
            raise ValueError(f"{closing!r} stands behind its JSON")
        arguments = ""
        while member := _MEMBER.match(text, at):
            _, at = _DECODER.raw_decode(text, member.end())
            arguments = text[member.end() : at] if json.loads(member[1]) == key else arguments
        return behind + len(closing) if form.end else end, ToolCall(name=name, arguments=arguments)
    except (ValueError, RecursionError) as error:
        resumed = re.compile(form.resume, re.IGNORECASE).search(text, at)
        wrong = isinstance(error, json.JSONDecodeError) and f"{error.msg} at {text[error.pos : error.pos + 20]!r}"
        return resumed.end() if resumed else len(text), f"A call was not executed: {wrong or error}. {form.example}."


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
