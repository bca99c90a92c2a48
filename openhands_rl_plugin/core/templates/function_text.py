"""Calls in the text form of OpenHands, of SWE-Gym's rows and of the V1 SDK: ``<function=NAME>``, a
``<parameter=NAME>value</parameter>`` for each argument, ``</function>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.parsing import (
    UNKNOWN,
    NotJson,
    Parameter,
    RenderError,
    decode,
    dumps,
    fits,
    is_unicode,
    signature,
    signatures,
)
from openhands_rl_plugin.core.types import JsonObject, ToolCall

JSON_OPEN = "<json>"
JSON_CLOSE = "</json>"

_STRUCTURE = re.compile(r"</?(?:function|parameter)", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?\d{1,4000}", re.ASCII)
# Servers end an answer before the closing tag, which is the stop sequence.
_CALL = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|</function\Z|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)</parameter>", re.DOTALL)


def calls_in_text(text: str, tools: Sequence[JsonObject] = ()) -> tuple[ToolCall, ...]:
    """The calls of an answer, as OpenHands finds them: a value ends at the first closing tag.

    ``tools`` say the types of the parameters. Arguments in a body that is JSON are taken as they stand.
    """
    known, calls = signatures(tools), list[ToolCall]()
    for name, body in _CALL.findall(text):
        own = known.get(name, UNKNOWN)
        # No search runs beyond the last closing tag, once for each opening one.
        closed, plain = body[: body.rfind("</parameter>") + len("</parameter>")], body.strip()
        values = {each: read_value(value, own.parameter(each)) for each, value in _PARAMETER.findall(closed)}
        calls.append(ToolCall(name=name, arguments=plain if plain.startswith("{") else dumps(values)))
    return tuple(calls)


def without_calls(text: str) -> str:
    """What an answer says beside its calls."""
    return _CALL.sub("", text).strip()


def write_value(value: JsonValue, parameter: Parameter) -> str:
    """The text that ``read_value`` gives back as ``value``, as plain as it can be."""
    if isinstance(value, str):
        plain = f"\n{value}\n" if "\n" in value else value
    else:
        plain = json.dumps(value, ensure_ascii=False)
    if _STRUCTURE.search(plain) or not _same(read_value(plain, parameter), value):
        return JSON_OPEN + as_json(value) + JSON_CLOSE
    return plain


def read_value(text: str, parameter: Parameter) -> JsonValue:
    """The value of ``text``. Text that cannot be of the parameter's types stays text."""
    if len(text) > 1 and text[0] == text[-1] == "\n":
        text = text[1:-1]
    stripped = text.strip()
    if stripped.startswith(JSON_OPEN) and stripped.endswith(JSON_CLOSE):
        try:
            return json.loads(stripped[len(JSON_OPEN) : -len(JSON_CLOSE)])
        except (ValueError, RecursionError):
            return text
    if "string" not in parameter.types:
        return _typed(stripped, text, parameter.types)
    if parameter.allowed and text not in parameter.allowed and stripped in parameter.allowed:
        return stripped
    return text


def as_json(value: JsonValue) -> str:
    """JSON without any ``<``, so that no tag can be seen in it."""
    return dumps(value).replace("<", "\\u003c")


def _typed(stripped: str, text: str, types: frozenset[str]) -> JsonValue:
    if _INTEGER.fullmatch(stripped) and fits(0, types):
        return int(stripped)
    try:
        value = decode(stripped)
    except NotJson:
        return text
    return text if isinstance(value, str) else value


def _same(one: JsonValue, other: JsonValue) -> bool:
    """Equal, and of the same types all the way down; text must be writable as UTF-8 too."""
    if isinstance(one, str) and isinstance(other, str):
        return one == other and is_unicode(one)
    return json.dumps(one) == json.dumps(other)


def render_call(call: ToolCall, tool: JsonObject | None = None) -> str:
    """The call as text. ``tool`` declares the types; without it only strings are written plainly.

    Raises RenderError when the arguments are not a JSON object or the function's name cannot stand in a tag.
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
    if not all(_can_stand(name) for name in arguments):
        return f"<function={call.name}>\n{as_json(arguments)}\n</function>"
    declared = signature(tool)
    written = (
        f"<parameter={name}>{write_value(value, declared.parameter(name))}</parameter>\n"
        for name, value in arguments.items()
    )
    return f"<function={call.name}>\n{''.join(written)}</function>"


def _can_stand(name: str) -> bool:
    """Whether a name is read back from a tag as it is."""
    return bool(name) and name == name.strip(" \t\r\n\"'") and not any(mark in name for mark in "<>\n")
