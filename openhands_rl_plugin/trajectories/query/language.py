"""Text to query: ``run:demo adapter:shop@7..9 reward:<0.5 -label:* "No such file" sort:-tokens``.

A blank means and, ``|`` in a value or, ``-`` before a clause not. ``*`` in a value stands for anything, alone for any
value that is known; quotes take a text as it is. Numbers: ``5``, ``>20``, ``<0.5``, ``7..9``; also dates for times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime

from openhands_rl_plugin.core.browsing.terms import TEXTS, Column, Match, Term
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import TrajectoryOrder
from openhands_rl_plugin.core.types import FailureKind, StopReason
from openhands_rl_plugin.core.validation import unknown_name
from openhands_rl_plugin.trajectories.drift.causes import Cause
from openhands_rl_plugin.trajectories.query.query import OPINION_NOTES, Note, NoteTerm, Query, TextTerm
from openhands_rl_plugin.trajectories.query.scanner import Clause, Kind, Piece, alternatives_of, clauses_of

SORT = "sort"
WORDS = (*(column.value for column in Column), *(note.value for note in Note), SORT)
"""What may stand before a colon."""

_CAUSES = {cause.name.lower() for cause in Cause}
_CLOSED: dict[str, frozenset[str]] = {
    Column.STOP: frozenset(reason.value for reason in StopReason),
    Column.FAILED: frozenset(kind.value for kind in FailureKind),
    Note.BREAK: frozenset(_CAUSES),
}
"""Words whose values are known."""
_TIMES = (Column.STARTED, Column.FINISHED)
_COMPARED = re.compile(r"(>=|<=|>|<)?(.+)", re.DOTALL)
_SIGNS = {">=": "at_least", "<=": "at_most", ">": "above", "<": "below"}
_VERSIONS = re.compile(r"(\d{1,9})?(?:(\.\.)(\d{1,9})?)?")


def parse_query(text: str) -> Query:
    """The query that a text means. Raises ``ConfigError``, one line that names the nearest known word."""
    terms: list[Term] = []
    notes: list[NoteTerm] = []
    texts: list[TextTerm] = []
    order: tuple[TrajectoryOrder | None, bool] = (None, False)
    for clause in clauses_of(text):
        word = clause.word
        if not word:
            texts.append(TextTerm(text=_plain(clause.value), negated=clause.negated))
        elif word == SORT:
            order = _order(clause)
        elif word in list(Column):
            matches = tuple(_match(Column(word), pieces) for pieces in _values(clause))
            terms.append(Term(column=Column(word), any_of=matches, negated=clause.negated))
        elif word in list(Note):
            read = _numeric if word in OPINION_NOTES else _textual
            matches = tuple(read(word, pieces) for pieces in _values(clause))
            notes.append(NoteTerm(note=Note(word), any_of=matches, negated=clause.negated))
        else:
            hint = f'; a text with a colon stands in quotes: "{word}:..."'
            raise ConfigError(unknown_name("word", word[:80], WORDS) + hint)
    sort, descending = order
    return Query(terms=tuple(terms), notes=tuple(notes), texts=tuple(texts), sort=sort, descending=descending)


def _values(clause: Clause) -> list[list[Piece]]:
    found = alternatives_of(clause.value)
    if not all(found):
        raise ConfigError(f'{clause.word}: a value is missing; write {clause.word}:VALUE, or {clause.word}:"" for none')
    return found


def _order(clause: Clause) -> tuple[TrajectoryOrder, bool]:
    name = clause.value.removeprefix("-")
    if clause.negated or name not in list(TrajectoryOrder):
        raise ConfigError(unknown_name("order", name[:80], [each.value for each in TrajectoryOrder]))
    return TrajectoryOrder(name), clause.value.startswith("-")


def _plain(value: str) -> str:
    """A text: stars and bars outside of quotes are those signs."""
    return "|".join("".join(piece.text for piece in pieces) for pieces in alternatives_of(value))


def _match(column: Column, pieces: Sequence[Piece]) -> Match:
    if column not in TEXTS:
        return _numeric(column, pieces)
    if column is Column.ADAPTER:
        return _adapter(pieces)
    return _textual(column.value, pieces)


def _textual(word: str, pieces: Sequence[Piece]) -> Match:
    if not any(piece.kind is Kind.STAR for piece in pieces):
        text = "".join(piece.text for piece in pieces)
        if word in _CLOSED and text not in _CLOSED[word]:
            raise ConfigError(f"{word}: {unknown_name('value', text[:80], _CLOSED[word])}")
        return Match(text=text)
    like = [""]
    for piece in pieces:
        if piece.kind is Kind.STAR:
            like.append("")
        else:
            like[-1] += piece.text
    return Match(like=tuple(like)) if any(like) else Match()


def _adapter(pieces: Sequence[Piece]) -> Match:
    """``NAME``, ``NAME@7``, ``NAME@7..9``, ``@7``."""
    at = next((n for n, piece in enumerate(pieces) if piece.kind is Kind.RAW and "@" in piece.text), None)
    if at is None:
        return _textual(Column.ADAPTER, pieces)
    name, _, versions = pieces[at].text.partition("@")
    found = _VERSIONS.fullmatch(versions)
    if (
        found is None
        or at + 1 < len(pieces)
        or not (found[1] or found[3])
        or bool(found[1] and found[3] and not found[2])
    ):
        raise ConfigError(f"adapter: {versions[:80]!r} is no version; write adapter:NAME@7, @7..9 or @7..")
    first = None if found[1] is None else int(found[1])
    last = first if found[2] is None else None if found[3] is None else int(found[3])
    named = [*pieces[:at], *([Piece(Kind.RAW, name)] if name else [])]
    match = _textual(Column.ADAPTER, named) if named else Match()
    return match.model_copy(update={"first_version": first, "last_version": last})


def _numeric(column: str, pieces: Sequence[Piece]) -> Match:
    if [piece.kind for piece in pieces] == [Kind.STAR]:
        return Match()
    text = "".join(piece.text for piece in pieces)
    bounds: dict[str, float] = {}
    for part in text.split(","):
        low, dots, high = part.partition("..")
        compared = _COMPARED.fullmatch(part)
        if dots:
            bounds |= {name: _number(column, said) for name, said in (("at_least", low), ("at_most", high)) if said}
        elif compared is not None and compared[1]:
            bounds[_SIGNS[compared[1]]] = _number(column, compared[2])
        else:
            bounds |= dict.fromkeys(("at_least", "at_most"), _number(column, part))
    if not bounds:
        raise ConfigError(f"{column}: {text!r} has no bound; write {column}:1..5")
    return Match.model_validate(bounds)


def _number(column: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = _time(text) if column in _TIMES else math.nan
    if not math.isfinite(number):
        instead = f"{column}:>2026-01-31" if column in _TIMES else f"{column}:5, {column}:>20 or {column}:7..9"
        raise ConfigError(f"{column}: {text[:80]!r} is no number; write {instead}")
    return number


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return math.nan
