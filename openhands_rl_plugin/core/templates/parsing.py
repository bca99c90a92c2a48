"""The parsed answer of a model. Errors are values here: nothing in this folder raises on a model's text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import RLError, unknown_name
from openhands_rl_plugin.core.types import JsonObject, ToolCall


class RenderError(RLError):
    """A call or a conversation cannot be written in the wanted form."""


class ProblemKind(StrEnum):
    """The error of a call, or the correction made to read it."""

    UNCLOSED = "unclosed"  # a block or a value does not end
    BAD_JSON = "bad_json"  # what should be JSON is not
    BAD_SHAPE = "bad_shape"  # JSON, but not a call: no name, arguments that are no object, an empty block
    STRAY_TEXT = "stray_text"  # text or tags inside a call, or closing tags after one, where none may stand
    DUPLICATE = "duplicate"  # a key or a parameter is given twice
    UNKNOWN_FUNCTION = "unknown_function"
    UNKNOWN_PARAMETER = "unknown_parameter"
    MISSING_PARAMETER = "missing_parameter"
    BAD_VALUE = "bad_value"  # not of the parameter's type, or not one of its allowed values
    IN_THOUGHT = "in_thought"  # a call inside <think> is not executed
    REENCODED = "reencoded"  # arguments came as a JSON string, as null, or under another key
    NESTED = "nested"  # more tags than needed around a call


class Span(NamedTuple):
    """Half-open range of characters in the answer."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Problem:
    """``message`` names cause and remedy, to be fed back to the model."""

    kind: ProblemKind
    message: str
    span: Span


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer taken apart. Every call that the model began is in ``calls`` or in ``problems``, whole.

    ``before`` is all text ahead of the first call or problem (with the thought, as the model wrote it) and ``after``
    all text behind it that belongs to none. ``spans`` has the place of each of ``calls``. ``notes`` say what was put
    right in a call that is in ``calls``, and which calls stood in a thought while others did not. ``thought`` is what
    stood in ``<think>``.
    """

    before: str
    calls: tuple[ToolCall, ...] = ()
    after: str = ""
    problems: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()
    spans: tuple[Span, ...] = ()
    thought: str = ""

    @property
    def feedback(self) -> str:
        """All problems as one message to the model; empty when there is none."""
        return "\n".join(problem.message for problem in self.problems)


MAX_DEPTH = 64

_SPACE = re.compile(r"[ \t\n\r]*+")
_BRACKET_OR_STRING = re.compile(r'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class NotJson(ValueError):
    """Why a text is not JSON, and whether it is so because it ended too soon."""

    def __init__(self, reason: str, kind: ProblemKind = ProblemKind.BAD_JSON) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


class Member(NamedTuple):
    """A member of an object, with the range of its value's text."""

    value: JsonValue
    start: int
    end: int


class DecodedObject(NamedTuple):
    """The members of an object, with the range of each value's text, and where the object ends."""

    members: dict[str, Member]
    end: int


def skip_space(text: str, at: int) -> int:
    """The position of the next character that is not white space."""
    if text[at : at + 1] > " ":
        return at
    match = _SPACE.match(text, at)
    return match.end() if match else at


def is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which no file can hold."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def dumps(value: JsonValue) -> str:
    """The value as JSON in Unicode, in ASCII where only that can be written to a file."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_unicode(text) else json.dumps(value)


def decode(text: str) -> JsonValue:
    """The only value in ``text``. Raises NotJson."""
    _refuse_depth(text, 0, len(text))
    value, end = _value(text, skip_space(text, 0))
    if skip_space(text, end) != len(text):
        raise NotJson("there is text after the value")
    return value


def decode_object(text: str, at: int, stop: int) -> DecodedObject:
    """The object whose brace is at ``at``. Raises NotJson.

    ``stop`` is where it ends at the latest if no string in it holds a tag.
    """
    _refuse_depth(text, at, stop)
    members: dict[str, Member] = {}
    at = skip_space(text, at + 1)
    if text[at : at + 1] == "}":
        return DecodedObject(members, at + 1)
    while True:
        if text[at : at + 1] != '"':
            raise _unexpected(text, at, "a key in double quotes")
        key, at = _value(text, at)
        at = skip_space(text, at)
        if text[at : at + 1] != ":":
            raise _unexpected(text, at, "a colon")
        start = skip_space(text, at + 1)
        value, end = _value(text, start)
        _add(members, str(key), Member(value, start, end))
        at = skip_space(text, end)
        mark = text[at : at + 1]
        if mark == "}":
            return DecodedObject(members, at + 1)
        if mark != ",":
            raise _unexpected(text, at, "a comma or }")
        at = skip_space(text, at + 1)


def _value(text: str, at: int) -> tuple[JsonValue, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise NotJson("a string is not closed", ProblemKind.UNCLOSED) from None
        if error.msg.startswith("Invalid \\"):
            raise NotJson("a string has a backslash that JSON does not know; write \\\\ for a backslash") from None
        if error.msg.startswith("Invalid control"):
            raise NotJson("a string has a line break or a tab; write \\n or \\t") from None
        raise _unexpected(text, skip_space(text, error.pos), error.msg.removeprefix("Expecting ")) from None
    except RecursionError:
        raise NotJson(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except NotJson:
        raise
    except ValueError:
        raise NotJson("a number has too many digits") from None


def _unexpected(text: str, at: int, wanted: str) -> NotJson:
    if at >= len(text):
        return NotJson(f"it ends where {wanted} must stand", ProblemKind.UNCLOSED)
    return NotJson(f"{text[at]!r} stands where {wanted} must stand")


def _refuse_depth(text: str, at: int, stop: int) -> None:
    """Refuse text that is nested too deep for JSON readers. Few brackets need no closer check."""
    if text.count("[", at, stop) + text.count("{", at, stop) <= MAX_DEPTH:
        return
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text, at, stop):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth > MAX_DEPTH:
            raise NotJson(f"it is nested deeper than {MAX_DEPTH} levels")


def _add[V](members: dict[str, V], key: str, value: V) -> None:
    if key in members:
        raise NotJson(f"the key {key!r} is given twice; give it once", ProblemKind.DUPLICATE)
    members[key] = value


def _pairs(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) < len(pairs):
        found.clear()
        for key, value in pairs:
            _add(found, key, value)
    return found


def _constant(name: str) -> JsonValue:
    raise NotJson(f"{name} is not JSON; write null or a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


STRING = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function: JSON Schema type names, and the allowed values (empty: any)."""

    types: frozenset[str] = STRING
    allowed: tuple[JsonValue, ...] = ()
    required: bool = False


UNDECLARED = Parameter()
"""A parameter that the tool does not know: it is read as text."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A function's parameters. ``open``: others than the declared ones may be given."""

    parameters: Mapping[str, Parameter]
    open: bool

    def parameter(self, name: str) -> Parameter:
        return self.parameters.get(name, UNDECLARED)


UNKNOWN = Signature(parameters={}, open=True)
"""The signature of a function that no tool declares."""


def signature(tool: JsonObject | None) -> Signature:
    """The signature that an OpenAI tool (or its ``function`` part alone) declares. Nulls count as absent."""
    function = _function(tool)
    schema = function.get("parameters")
    if not isinstance(schema, dict):
        return UNKNOWN
    properties = schema.get("properties")
    required = schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    declared = {
        name: _parameter(one, name in names)
        for name, one in (properties.items() if isinstance(properties, dict) else ())
        # Tables that merge all tools into one row type fill what a tool does not have with null.
        if one is not None
    }
    return Signature(declared, open=not declared or bool(schema.get("additionalProperties")))


def signatures(tools: Iterable[JsonObject]) -> dict[str, Signature]:
    """The signatures by function name."""
    return {str(_function(tool).get("name")): signature(tool) for tool in tools}


def fits(value: JsonValue, types: frozenset[str]) -> bool:
    """Whether ``value`` is of one of the JSON Schema ``types``."""
    match value:
        case bool():
            return "boolean" in types
        case int():
            return "integer" in types or "number" in types
        case float():
            return "number" in types
        case str():
            return "string" in types
        case None:
            return "null" in types
        case list():
            return "array" in types
        case _:
            return "object" in types


def check(answer: ParsedAnswer, tools: Sequence[JsonObject]) -> ParsedAnswer:
    """The answer with the calls that do not keep to ``tools`` turned into problems. No tools: nothing is checked."""
    if not tools or not answer.calls:
        return answer
    known = signatures(tools)
    kept: list[tuple[ToolCall, Span]] = []
    problems = list(answer.problems)
    for call, span in zip(answer.calls, answer.spans, strict=True):
        if (problem := _violation(call, span, known)) is None:
            kept.append((call, span))
        else:
            problems.append(problem)
    return replace(
        answer,
        calls=tuple(call for call, _ in kept),
        spans=tuple(span for _, span in kept),
        problems=tuple(sorted(problems, key=lambda problem: problem.span)),
    )


def _violation(call: ToolCall, span: Span, known: Mapping[str, Signature]) -> Problem | None:
    own = known.get(call.name)
    if own is None:
        return Problem(ProblemKind.UNKNOWN_FUNCTION, _message(call, unknown_name("function", call.name, known)), span)
    arguments: dict[str, JsonValue] = json.loads(call.arguments)
    for name, value in arguments.items():
        if name not in own.parameters:
            if not own.open:
                reason = unknown_name("parameter", name, own.parameters)
                return Problem(ProblemKind.UNKNOWN_PARAMETER, _message(call, reason), span)
        elif (reason := _misfit(name, value, own.parameters[name])) is not None:
            return Problem(ProblemKind.BAD_VALUE, _message(call, reason), span)
    missing = [name for name, one in own.parameters.items() if one.required and name not in arguments]
    if missing:
        reason = f"required but not given: {', '.join(missing)}"
        return Problem(ProblemKind.MISSING_PARAMETER, _message(call, reason), span)
    return None


def _misfit(name: str, value: JsonValue, parameter: Parameter) -> str | None:
    if value is None and not parameter.required:
        return None
    if not fits(value, parameter.types):
        return f"parameter {name!r} must be of type {' or '.join(sorted(parameter.types))}, got {_short(value)}"
    if parameter.allowed and value not in parameter.allowed:
        return f"parameter {name!r} must be one of {_short(list(parameter.allowed))}, got {_short(value)}"
    return None


def _message(call: ToolCall, reason: str) -> str:
    return f"The call of {call.name!r} was not executed: {reason}."


def _short(value: JsonValue) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _function(tool: JsonObject | None) -> JsonObject:
    inner = (tool or {}).get("function")
    return inner if isinstance(inner, dict) else tool or {}


def _parameter(schema: JsonValue, required: bool) -> Parameter:
    if not isinstance(schema, dict):
        return Parameter(required=required)
    allowed = schema.get("enum")
    return Parameter(_types(schema), tuple(allowed) if isinstance(allowed, list) else (), required)


def _types(schema: JsonObject) -> frozenset[str]:
    """The type names of a schema; one that declares none is of text, as in OpenHands."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(str(one) for one in named)
    for union in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(union), list):
            return frozenset().union(*(_types(one) for one in branches if isinstance(one, dict)))
    if isinstance(allowed := schema.get("enum"), list):
        return frozenset(kind for kind in _ALL for value in allowed if fits(value, frozenset({kind})))
    return STRING


_ALL = ("boolean", "integer", "number", "string", "null", "array", "object")


class Tag(NamedTuple):
    """A tag in the text. ``kind`` is in lower case, with a slash if it closes."""

    kind: str
    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the answer that is a call, several calls, or a broken one."""

    span: Span
    calls: tuple[ToolCall, ...] = ()
    problem: Problem | None = None
    notes: tuple[Problem, ...] = ()


@dataclass(slots=True)
class Blocks:
    """The findings so far, in and out of the thought."""

    spoken: list[Block] = field(default_factory=list)
    thought_of: list[Block] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    thinking: Tag | None = None
    thought_until: int = 0

    def add(self, block: Block) -> None:
        (self.spoken if self.thinking is None else self.thought_of).append(block)

    def begin_thought(self, tag: Tag) -> None:
        self.thinking = self.thinking or tag

    def end_thought(self, text: str, tag: Tag) -> None:
        """A first ``</think>`` without ``<think>`` ends a thought that the prompt opened."""
        if self.thinking is not None:
            self.thoughts.append(text[self.thinking.end : tag.start])
        elif not self.thoughts:
            self.thoughts.append(text[: tag.start])
            self.thought_of += self.spoken
            self.spoken.clear()
        self.thinking = None
        self.thought_until = tag.end


def scan(
    text: str, tags: Sequence[Tag], read: Callable[[int, Blocks], int], read_end: Callable[[Blocks], None]
) -> ParsedAnswer:
    """Go through ``tags`` once. ``read`` adds the block at an index and returns the index behind it; ``read_end`` adds
    what the end of the text cut.
    """
    blocks = Blocks()
    at = 0
    while at < len(tags):
        tag = tags[at]
        if tag.kind == "think":
            blocks.begin_thought(tag)
            at += 1
        elif tag.kind == "/think":
            blocks.end_thought(text, tag)
            at += 1
        else:
            at = read(at, blocks)
    read_end(blocks)
    if blocks.thinking is not None:
        blocks.thoughts.append(text[blocks.thinking.end :])
        blocks.thought_until = len(text)
    return _assembled(text, blocks)


def _assembled(text: str, blocks: Blocks) -> ParsedAnswer:
    spoken = blocks.spoken
    calls = [(call, block.span) for block in spoken for call in block.calls]
    problems = [block.problem for block in spoken if block.problem is not None]
    notes = [note for block in spoken for note in block.notes]
    unspoken = [_in_thought(block) for block in blocks.thought_of if block.calls]
    # A model that only thought of a call did not mean its thought to be the answer.
    silent = not spoken and not text[blocks.thought_until :].strip()
    (problems if silent else notes).extend(unspoken)
    first, last = (spoken[0].span.start, spoken[-1].span.end) if spoken else (len(text), len(text))
    gaps = [text[one.span.end : other.span.start] for one, other in pairwise(spoken)]
    return ParsedAnswer(
        before=text[:first],
        calls=tuple(call for call, _ in calls),
        after="".join([*gaps, text[last:]]),
        problems=tuple(problems),
        notes=tuple(notes),
        spans=tuple(span for _, span in calls),
        thought="\n".join(thought.strip() for thought in blocks.thoughts),
    )


def _in_thought(block: Block) -> Problem:
    names = ", ".join(repr(call.name) for call in block.calls)
    message = f"The call of {names} was not executed: it stands inside <think>. Write calls after </think>."
    return Problem(ProblemKind.IN_THOUGHT, message, block.span)
