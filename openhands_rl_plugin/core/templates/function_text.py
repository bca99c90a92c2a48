"""Calls in the text form of OpenHands, of SWE-Gym's rows and of the V1 SDK: ``<function=NAME>``, a
``<parameter=NAME>value</parameter>`` for each argument, ``</function>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.parsing import RenderError
from openhands_rl_plugin.core.types import JsonObject, ToolCall

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
