"""The declarations of the offered tools, and the check of calls against them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.parsed import ParsedAnswer, Problem, ProblemKind, Span
from openhands_rl_plugin.core.types import JsonObject, ToolCall
from openhands_rl_plugin.core.validation import unknown_name

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
