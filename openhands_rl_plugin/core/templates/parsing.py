"""Calls in the text of an answer: JSON objects between ``<tool_call>`` tags or bare, or OpenHands' ``<function=NAME>``.

Of a family of models strict JSON is a call; what is not is a problem, whose message is for the model. The calls of
OpenHands, of SWE-Gym's rows and of the V1 SDK have a ``<parameter=NAME>value</parameter>`` for each argument, and end
with ``</function>``. Nothing here raises on a model's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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


Types = frozenset[str]
"""Names of types of JSON Schema."""
STRING: Types = frozenset({"string"})
"""Of a parameter that no tool declares."""

_STRUCTURE = re.compile(r"</?(?:function|parameter)", re.IGNORECASE)
_SURROGATE = re.compile("[\ud800-\udfff]")  # no file can hold one alone
_AS_JSON = re.compile(r"\s*+<json>(.*)</json>\s*", re.DOTALL)
# Servers end an answer before the closing tag, which is the stop sequence.
_CALL = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|</function\Z|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)</parameter>", re.DOTALL)


def calls_in_text(text: str, tools: Sequence[JsonObject] = ()) -> tuple[ToolCall, ...]:
    """The calls of an answer, as OpenHands finds them: a value ends at the first closing tag.

    ``tools`` declare the types of the parameters. Arguments in a body that is JSON are taken as they stand.
    """
    known, calls = {function_of(tool).get("name"): parameters_of(tool) for tool in tools}, list[ToolCall]()
    for name, body in _CALL.findall(text):
        own = known.get(name, {})
        # No search runs beyond the last closing tag, once for each opening one.
        closed, plain = body[: body.rfind("</parameter>") + len("</parameter>")], body.strip()
        values = {each: read_value(value, own.get(each, STRING)) for each, value in _PARAMETER.findall(closed)}
        calls.append(ToolCall(name=name, arguments=plain if plain.startswith("{") else _dumps(values)))
    return tuple(calls)


def without_calls(text: str) -> str:
    """What an answer says beside its calls."""
    return _CALL.sub("", text).strip()


def parameters_of(tool: JsonObject | None) -> Mapping[str, Types]:
    """The parameters of an OpenAI tool (or of its ``function`` part alone) with their types. Nulls count as absent."""
    schema = function_of(tool).get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return {name: _types(each) for name, each in (properties.items() if isinstance(properties, dict) else ())}


def function_of(tool: JsonObject | None) -> JsonObject:
    """The ``function`` part of an OpenAI tool, or the tool where it is that part alone."""
    inner = (tool or {}).get("function")
    return inner if isinstance(inner, dict) else tool or {}


def _types(schema: JsonValue) -> Types:
    """The types of a schema; one that declares none is of text, as in OpenHands."""
    declared = schema if isinstance(schema, dict) else {}
    named, branches = declared.get("type"), declared.get("anyOf") or declared.get("oneOf")
    if isinstance(branches, list) and not named:
        return frozenset[str]().union(*map(_types, branches))
    return (
        frozenset(map(str, named))
        if isinstance(named, list)
        else frozenset({named})
        if isinstance(named, str)
        else STRING
    )


def write_value(value: JsonValue, types: Types) -> str:
    """The text that ``read_value`` gives back as ``value``, as plain as it can be."""
    if isinstance(value, str):
        plain = f"\n{value}\n" if "\n" in value else value
    else:
        plain = json.dumps(value, ensure_ascii=False)
    read = read_value(plain, types)
    # Equal, and of the same types all the way down.
    same = (
        read == value and not _SURROGATE.search(plain)
        if isinstance(value, str)
        else json.dumps(read) == json.dumps(value)
    )
    return plain if same and not _STRUCTURE.search(plain) else f"<json>{_without_tags(value)}</json>"


def read_value(text: str, types: Types) -> JsonValue:
    """The value of ``text``. Text that cannot be of the parameter's ``types`` stays text."""
    if len(text) > 1 and text[0] == text[-1] == "\n":
        text = text[1:-1]
    written = _AS_JSON.fullmatch(text)
    try:
        if written or "string" not in types:
            value = json.loads(written[1] if written else text)
            return text if isinstance(value, str) and not written else value
    except (ValueError, RecursionError):
        pass
    return text


def render_call(call: ToolCall, tool: JsonObject | None = None) -> str:
    """The call as text. ``tool`` declares the types; without it only strings are written plainly.

    Raises ``RenderError`` when the arguments are not a JSON object or the function's name cannot stand in a tag.
    """
    if not _can_stand(call.name):
        raise RenderError(f"the function name {call.name!r} cannot stand in a tag; rename the function")
    try:
        arguments = json.loads(call.arguments or "{}")
        json.dumps(arguments, allow_nan=False)  # NaN and the infinities are no JSON, though Python reads them
    except (ValueError, RecursionError) as error:
        raise RenderError(f"the arguments of {call.name!r} are not JSON ({error}); mend or drop the call") from error
    if not isinstance(arguments, dict):
        raise RenderError(f"the arguments of {call.name!r} are no JSON object; mend or drop the call")
    if not all(map(_can_stand, arguments)):
        return f"<function={call.name}>\n{_without_tags(arguments)}\n</function>"
    known = parameters_of(tool)
    values = ((name, write_value(value, known.get(name, STRING))) for name, value in arguments.items())
    written = "".join(f"<parameter={name}>{value}</parameter>\n" for name, value in values)
    return f"<function={call.name}>\n{written}</function>"


def _can_stand(name: str) -> bool:
    """Whether a name is read back from a tag as it is."""
    return bool(name) and name == name.strip(" \t\r\n\"'") and not any(mark in name for mark in "<>\n")


def _dumps(value: JsonValue) -> str:
    """The value as JSON in Unicode, in ASCII where only that can be written to a file."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def _without_tags(value: JsonValue) -> str:
    """The value as JSON in which no tag can be seen."""
    return _dumps(value).replace("<", "\\u003c")
