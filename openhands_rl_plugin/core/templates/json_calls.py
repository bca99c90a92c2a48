"""From JSON objects in an answer to calls: the shapes that models give them."""

from __future__ import annotations

import json

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.parsed import ProblemKind
from openhands_rl_plugin.core.templates.strict_json import (
    DecodedObject,
    Member,
    NotJson,
    decode,
    decode_object,
    dumps,
    is_unicode,
)
from openhands_rl_plugin.core.types import ToolCall

_BESIDE = {"name", "arguments", "id", "type", "index"}
_DEEPEST_STRING = 3
_NEED = 'a call needs a "name" and an object of "arguments"'


class BadCall(Exception):
    """The object is no call; ``kind`` and ``reason`` say why."""

    def __init__(self, kind: ProblemKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


Notes = list[tuple[ProblemKind, str]]


def call_of(text: str, decoded: DecodedObject, notes: Notes) -> ToolCall:
    """The call in an object of ``text``; corrections are added to ``notes``. Raises ``BadCall``."""
    members = decoded.members
    if "name" not in members and isinstance(members.get("function", _ABSENT).value, dict):
        inner = members["function"]
        notes.append((ProblemKind.REENCODED, 'the name and the arguments were taken out of "function"'))
        return call_of(text, decode_object(text, inner.start, inner.end), notes)
    name = members.get("name", _ABSENT).value
    if not isinstance(name, str) or not name or not is_unicode(name):
        raise BadCall(ProblemKind.BAD_SHAPE, f"it has no name; {_NEED}")
    key = "parameters" if "parameters" in members and "arguments" not in members else "arguments"
    extra = sorted(set(members) - _BESIDE - {key})
    if extra and key not in members:
        raise BadCall(ProblemKind.BAD_SHAPE, f"{extra[0]!r} stands beside the name, not in the arguments; {_NEED}")
    if extra:
        notes.append((ProblemKind.BAD_SHAPE, f"what stands beside the arguments was left out: {', '.join(extra)}"))
    return ToolCall(name=name, arguments=_arguments(text, members.get(key), notes))


def _arguments(text: str, member: Member | None, notes: Notes) -> str:
    """The arguments' own text."""
    value = None if member is None else member.value
    if isinstance(value, dict) and member is not None:
        return text[member.start : member.end]
    if isinstance(value, str):
        return _unwrapped(value, notes)
    if value is None:
        notes.append((ProblemKind.REENCODED, "missing arguments were read as none"))
        return "{}"
    raise BadCall(ProblemKind.BAD_SHAPE, f"its arguments are {json.dumps(value)[:60]}, not an object; {_NEED}")


def _unwrapped(value: str, notes: Notes) -> str:
    """The object that a string of JSON, or a string of that, holds."""
    notes.append((ProblemKind.REENCODED, "the arguments were a string of JSON; give an object"))
    inner: JsonValue = value
    for _ in range(_DEEPEST_STRING):
        if not isinstance(inner, str):
            break
        if not inner.strip():
            return "{}"
        try:
            found = decode(inner)
        except NotJson as error:
            raise BadCall(error.kind, f"its arguments are a string that is not JSON: {error.reason}; {_NEED}") from None
        if isinstance(found, dict):
            return inner.strip() if is_unicode(inner) else dumps(found)
        inner = found
    raise BadCall(ProblemKind.BAD_SHAPE, f"its arguments are a string, not an object; {_NEED}")


_ABSENT = Member(None, 0, 0)
