"""The words of a query and the pieces of their values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from openhands_rl_plugin.core.errors import ConfigError

LONGEST = 10_000
"""Characters of a query."""

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_CLAUSE = re.compile(rf'\s*(-?)((?:[A-Za-z_]+:)?)((?:{_QUOTED}|[^\s"])*)', re.DOTALL)
_PIECE = re.compile(rf'(?P<quoted>{_QUOTED})|(?P<star>\*)|(?P<bar>\|)|(?P<raw>[^"*|]+)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class Clause(NamedTuple):
    """``-word:value``; ``word`` is empty for a text."""

    negated: bool
    word: str
    value: str


class Kind(Enum):
    """How a piece of a value was written."""

    RAW = "raw"
    QUOTED = "quoted"
    STAR = "*"


class Piece(NamedTuple):
    """A part of a value between stars and bars."""

    kind: Kind
    text: str


def clauses_of(text: str) -> Iterator[Clause]:
    """The clauses in order. Raises ``ConfigError`` for a quote that is not closed, and for a text without end."""
    if len(text) > LONGEST:
        raise ConfigError(f"the query has {len(text):,} characters; at most {LONGEST:,} are read")
    at = 0
    while text[at:].strip():
        found = _CLAUSE.match(text, at)
        assert found is not None, "every part of it may be empty"
        if found.end() < len(text) and not text[found.end()].isspace():
            rest = text[found.end() : found.end() + 40]
            raise ConfigError(f'{rest}: a quote is not closed; write \\" for one that is meant')
        yield Clause(bool(found[1]), found[2].removesuffix(":"), found[3])
        at = found.end()


def alternatives_of(value: str) -> list[list[Piece]]:
    """The values between bars, each in pieces."""
    found: list[list[Piece]] = [[]]
    for piece in _PIECE.finditer(value):
        if piece["bar"]:
            found.append([])
        elif piece["star"]:
            found[-1].append(Piece(Kind.STAR, "*"))
        elif piece["quoted"]:
            found[-1].append(Piece(Kind.QUOTED, _ESCAPED.sub(r"\1", piece["quoted"][1:-1])))
        else:
            found[-1].append(Piece(Kind.RAW, piece["raw"]))
    return found


def quoted(text: str) -> str:
    """``text`` in quotes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
