"""Query to text, in a form that ``parse_query`` makes the same query of."""

from __future__ import annotations

import re
from collections.abc import Iterator

from openhands_rl_plugin.core.browsing.terms import TEXTS, Column, Match
from openhands_rl_plugin.trajectories.query.query import OPINION_NOTES, Query
from openhands_rl_plugin.trajectories.query.scanner import quoted

_PLAIN = re.compile(r'[^\s|*"\\@]+')
_WORD = re.compile(r'[^\s|*"\\:-][^\s|*"\\:]*')


def query_text(query: Query) -> str:
    """The text of a query: columns first, then notes, texts and the order."""
    return " ".join(_clauses(query))


def _clauses(query: Query) -> Iterator[str]:
    for term in query.terms:
        textual = term.column in TEXTS
        values = "|".join(_textual(each) if textual else _numeric(each) for each in term.any_of)
        yield f"{_not(term.negated)}{term.column.value}:{values}"
    for note in query.notes:
        told = _numeric if note.note in OPINION_NOTES else _textual
        yield f"{_not(note.negated)}{note.note.value}:{'|'.join(map(told, note.any_of))}"
    for text in query.texts:
        yield _not(text.negated) + (text.text if _WORD.fullmatch(text.text) else quoted(text.text))
    if query.sort is not None:
        yield f"sort:{_not(query.descending)}{query.sort.value}"


def _not(negated: bool) -> str:
    return "-" if negated else ""


def _textual(match: Match) -> str:
    first, last = match.first_version, match.last_version
    versions = ""
    if first is not None or last is not None:
        ends = tuple("" if each is None else str(each) for each in (first, last))
        versions = f"@{first}" if first == last else f"@{ends[0]}..{ends[1]}"
    if match.text is not None:
        return (_piece(match.text) or '""') + versions
    if match.like is not None:
        return "*".join(map(_piece, match.like)) + versions
    return versions or "*"


def _piece(text: str) -> str:
    return text if not text or _PLAIN.fullmatch(text) else quoted(text)


def _numeric(match: Match) -> str:
    least, most = match.at_least, match.at_most
    parts: list[str] = []
    if least is not None and least == most:
        parts.append(_number(least))
    elif least is not None or most is not None:
        parts.append(f"{'' if least is None else _number(least)}..{'' if most is None else _number(most)}")
    parts += [
        f"{sign}{_number(value)}" for sign, value in ((">", match.above), ("<", match.below)) if value is not None
    ]
    return ",".join(parts) or "*"


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


def column_clause(column: Column, value: str | None) -> str:
    """The clause of one value of a facet, to be put into a query."""
    if value is None:
        return f"-{column.value}:*"
    return f"{column.value}:{value if column is Column.ADAPTER and '@' in value else _piece(value) or quoted('')}"
