"""Strict JSON, with a reason where a text is none. Duplicate keys, ``NaN`` and infinities are refused."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.parsed import ProblemKind

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
