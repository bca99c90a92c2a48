"""Parameter values between the tags of OpenHands' text form. The form itself is described in ``function_text``."""

from __future__ import annotations

import json
import re
from enum import StrEnum

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.signatures import Parameter, fits
from openhands_rl_plugin.core.templates.strict_json import NotJson, decode, dumps, is_unicode

JSON_OPEN = "<json>"
JSON_CLOSE = "</json>"

_STRUCTURE = re.compile(r"</?(?:function|parameter)", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?\d{1,4000}", re.ASCII)


class Newlines(StrEnum):
    """The meaning of line breaks next to the tags."""

    WRAPPED = "wrapped"  # SWE-Gym's rows, the V1 SDK and our writer: one break at each end is not part of the value
    VERBATIM = "verbatim"  # OpenHands 1.6: values stand between their tags as they are


def write_value(value: JsonValue, parameter: Parameter) -> str:
    """The text that ``read_value`` gives back as ``value``, as plain as it can be."""
    if isinstance(value, str):
        plain = f"\n{value}\n" if "\n" in value else value
    else:
        plain = json.dumps(value, ensure_ascii=False)
    if _STRUCTURE.search(plain) or not _same(read_value(plain, parameter, Newlines.WRAPPED), value):
        return JSON_OPEN + as_json(value) + JSON_CLOSE
    return plain


def read_value(text: str, parameter: Parameter, newlines: Newlines) -> JsonValue:
    """The value of ``text``. Text that cannot be of the parameter's types stays text."""
    if newlines is Newlines.WRAPPED and len(text) > 1 and text[0] == text[-1] == "\n":
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
