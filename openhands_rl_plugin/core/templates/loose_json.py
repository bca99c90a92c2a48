"""JSON as models write it: strict first, then with the slips that have only one reading.

Read loosely are raw line breaks and tabs in strings, trailing commas, single-quoted strings, and ``True``, ``False``
and ``None``. Refused are ``NaN`` and infinities, duplicate keys, unknown escapes and everything else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.parsed import ProblemKind

MAX_DEPTH = 64

_SPACE = re.compile(r"[ \t\n\r]*+")
_DOUBLE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACKET_OR_STRING = re.compile(r'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SINGLE = re.compile(r"'[^'\\]*+(?:\\.[^'\\]*+)*+'", re.DOTALL)
_IN_SINGLE = re.compile(r"\\.|\"", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][+-]?\d++)?(?![\w.])", re.ASCII)
_WORD = re.compile(r"-?[A-Za-z_]\w*+", re.ASCII)
_WORDS: dict[str, JsonValue] = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class NotJson(ValueError):
    """Why a text is not JSON, and whether it is so because it ended too soon."""

    def __init__(self, reason: str, kind: ProblemKind = ProblemKind.BAD_JSON) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


class Decoded(NamedTuple):
    """A JSON value, the end of its text, and the deviations from strict JSON."""

    value: JsonValue
    end: int
    repairs: frozenset[str]


class Member(NamedTuple):
    """A member of an object, with the range of its value's text."""

    value: JsonValue
    start: int
    end: int


class DecodedObject(NamedTuple):
    """The members of an object, with the range of each value's text, and where the object ends."""

    members: dict[str, Member]
    end: int
    repairs: frozenset[str]


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


def decode(text: str) -> Decoded:
    """The only value in ``text``. Raises NotJson."""
    _refuse_depth(text, 0, len(text))
    try:
        return Decoded(_DECODER.decode(text), len(text), frozenset())
    except NotJson:
        raise
    except (ValueError, RecursionError):
        pass
    reader = _Loose(text)
    value, end = reader.value(skip_space(text, 0), 0)
    if skip_space(text, end) != len(text):
        raise NotJson("there is text after the value")
    return Decoded(value, end, frozenset(reader.repairs))


def decode_object(text: str, at: int, stop: int) -> DecodedObject:
    """The object whose brace is at ``at``. Raises NotJson.

    ``stop`` is where it ends at the latest if no string in it holds a tag; strict reading does not look further.
    """
    _refuse_depth(text, at, stop)
    try:
        return _strict_object(text[at:stop], at)
    except NotJson as error:
        if error.kind is ProblemKind.DUPLICATE:
            raise
    except (ValueError, RecursionError):
        pass
    reader = _Loose(text)
    members, end = reader.members(at, 0)
    return DecodedObject(members, end, frozenset(reader.repairs))


def _refuse_depth(text: str, at: int, stop: int) -> None:
    """Refuse text that is nested too deep for JSON readers. Few brackets need no closer check."""
    if text.count("[", at, stop) + text.count("{", at, stop) <= MAX_DEPTH:
        return
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text, at, stop):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth > MAX_DEPTH:
            raise NotJson(f"it is nested deeper than {MAX_DEPTH} levels")


def _strict_object(text: str, offset: int) -> DecodedObject:
    """Members by the C scanner, one at a time, because the range of each is wanted."""
    members: dict[str, Member] = {}
    at = skip_space(text, 1)
    if text[at : at + 1] == "}":
        return DecodedObject(members, offset + at + 1, frozenset())
    while True:
        if text[at : at + 1] != '"':
            raise NotJson("a key is missing")
        key, at = _DECODER.raw_decode(text, at)
        at = skip_space(text, at)
        if text[at : at + 1] != ":":
            raise NotJson("a colon is missing")
        start = skip_space(text, at + 1)
        value, end = _DECODER.raw_decode(text, start)
        _add(members, key, Member(value, offset + start, offset + end))
        at = skip_space(text, end)
        mark = text[at : at + 1]
        if mark == "}":
            return DecodedObject(members, offset + at + 1, frozenset())
        if mark != ",":
            raise NotJson("a comma is missing")
        at = skip_space(text, at + 1)


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
_RAW_STRINGS = json.JSONDecoder(strict=False)


class _Loose:
    """Recursive descent over ``text``; every method takes a position and returns a value and the position after it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.repairs: set[str] = set()

    def value(self, at: int, depth: int) -> tuple[JsonValue, int]:
        mark = self._text[at : at + 1]
        if mark == "{":
            members, end = self.members(at, depth)
            return {key: member.value for key, member in members.items()}, end
        if mark == "[":
            return self._list(at, depth)
        if mark and mark in "\"'":
            return self._string(at)
        if number := _NUMBER.match(self._text, at):
            try:
                return json.loads(number[0]), number.end()
            except ValueError:
                raise NotJson("a number has too many digits") from None
        if word := _WORD.match(self._text, at):
            return self._word(word[0]), word.end()
        raise self._unexpected(at, "a value")

    def members(self, at: int, depth: int) -> tuple[dict[str, Member], int]:
        """The object whose brace is at ``at``."""
        found: dict[str, Member] = {}

        def member(at: int) -> int:
            if self._text[at : at + 1] not in ('"', "'"):
                raise self._unexpected(at, "a key in double quotes")
            key, at = self._string(at)
            at = skip_space(self._text, at)
            if self._text[at : at + 1] != ":":
                raise self._unexpected(at, "a colon")
            start = skip_space(self._text, at + 1)
            value, end = self.value(start, depth + 1)
            _add(found, key, Member(value, start, end))
            return end

        return found, self._sequence(at, "}", depth, member)

    def _list(self, at: int, depth: int) -> tuple[JsonValue, int]:
        found: list[JsonValue] = []

        def item(at: int) -> int:
            value, end = self.value(at, depth + 1)
            found.append(value)
            return end

        end = self._sequence(at, "]", depth, item)
        return found, end

    def _sequence(self, at: int, closer: str, depth: int, read: Callable[[int], int]) -> int:
        """The parts between the opening mark at ``at`` and ``closer``, separated by commas."""
        if depth >= MAX_DEPTH:
            raise NotJson(f"it is nested deeper than {MAX_DEPTH} levels")
        at = skip_space(self._text, at + 1)
        if self._text[at : at + 1] == closer:
            return at + 1
        while True:
            at = skip_space(self._text, read(at))
            mark = self._text[at : at + 1]
            if mark == closer:
                return at + 1
            if mark != ",":
                raise self._unexpected(at, f"a comma or {closer}")
            at = skip_space(self._text, at + 1)
            if self._text[at : at + 1] == closer:
                self.repairs.add("a comma before a closing bracket was left out")
                return at + 1

    def _string(self, at: int) -> tuple[str, int]:
        single = self._text[at] == "'"
        match = (_SINGLE if single else _DOUBLE).match(self._text, at)
        if match is None:
            raise NotJson("a string is not closed", ProblemKind.UNCLOSED)
        body = match[0]
        if single:
            self.repairs.add("single quotes were read as double quotes")
            body = f'"{_IN_SINGLE.sub(_to_double, body[1:-1])}"'
        try:
            value = _RAW_STRINGS.decode(body)
        except ValueError:
            raise NotJson("a string has a backslash that JSON does not know; write \\\\ for a backslash") from None
        if any(character < " " for character in body):
            self.repairs.add("a line break or tab inside a string was read as \\n or \\t")
        return value, match.end()

    def _word(self, word: str) -> JsonValue:
        if word not in _WORDS:
            if word.lstrip("-") in ("NaN", "Infinity", "nan", "inf"):
                return _constant(word)
            raise NotJson(f"{word[:40]!r} is not JSON; put text in double quotes")
        if word[0].isupper():
            self.repairs.add("True, False or None was read as true, false or null")
        return _WORDS[word]

    def _unexpected(self, at: int, wanted: str) -> NotJson:
        if at >= len(self._text):
            return NotJson(f"it ends where {wanted} must stand", ProblemKind.UNCLOSED)
        return NotJson(f"{self._text[at]!r} stands where {wanted} must stand")


def _to_double(match: re.Match[str]) -> str:
    found = match[0]
    return '\\"' if found == '"' else "'" if found == "\\'" else found
