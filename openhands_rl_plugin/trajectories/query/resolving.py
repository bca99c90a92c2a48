"""A query as the filter of a storage: what no column says is looked up first and becomes a condition on ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from openhands_rl_plugin.core.browsing.listing import Browsable
from openhands_rl_plugin.core.browsing.terms import Column, Match, Term
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.judgements import standing, words_of
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.trajectories.query.opinion_index import opinions_among
from openhands_rl_plugin.trajectories.query.query import OPINION_NOTES, Note, NoteTerm, Query

_NOTHING = TrajectoryFilter(ids=())


class TextLookup(Protocol):
    """Finds episodes by what their nodes say."""

    async def having(self, text: str) -> Collection[str]:
        """The ids of the episodes with this text in a message."""
        ...

    async def breaking(self, any_of: Iterable[Match]) -> Collection[str]:
        """The ids of the episodes with a break of one of these causes."""
        ...


async def resolved(
    query: Query, storage: TrajectoryStorage, lookup: TextLookup | None = None, base: TrajectoryFilter | None = None
) -> TrajectoryFilter:
    """The filter of what a query finds among what ``base`` does (by default finished and unfinished episodes).

    Raises ``ConfigError`` where a storage cannot answer it, ``StorageError``.
    """
    where = base or TrajectoryFilter(finished=None)
    terms = [*where.terms, *query.terms]
    for note in query.notes:
        found = await _noted(note, storage, lookup, where.model_copy(update={"terms": tuple(terms)}))
        if not found and not note.negated:
            return _NOTHING
        terms += _ids(found, note.negated)
    for text in query.texts:
        if lookup is None:
            raise ConfigError("texts are not searched here; leave the words without a colon out of the query")
        found = await lookup.having(text.text)
        if not found and not text.negated:
            return _NOTHING
        terms += _ids(found, text.negated)
    update: dict[str, object] = {"terms": tuple(terms)}
    if query.sort is not None:
        update |= {"sort": query.sort, "descending": query.descending}
    if any(term.column is Column.STOP for term in query.terms):
        update["finished"] = None  # an episode that runs has stopped as "unfinished"
    return where.model_copy(update=update)


async def _noted(
    note: NoteTerm, storage: TrajectoryStorage, lookup: TextLookup | None, where: TrajectoryFilter
) -> Collection[str]:
    """``where``: what the other conditions find."""
    if note.note in OPINION_NOTES:
        said = await opinions_among(storage, where)
        return [each for each, told in said.items() if _holds(note, told.get(note.note.value))]
    if note.note is Note.BREAK:
        if lookup is None:
            raise ConfigError("breaks are not looked for here; leave break: out of the query")
        return await lookup.breaking(note.any_of)
    if not isinstance(storage, Browsable):
        raise ConfigError(f"{type(storage).__name__} does not list its labels; leave label: out of the query")
    labels = standing(await storage.all_labels())
    return {about for about, words in words_of(labels).items() if any(_holds(note, word) for word in words)}


def _holds(note: NoteTerm, value: str | float | None) -> bool:
    return any(each.holds(value) for each in note.any_of)


def _ids(found: Collection[str], negated: bool) -> list[Term]:
    matches = tuple(Match(text=identity) for identity in sorted(found))
    return [Term(column=Column.ID, any_of=matches, negated=negated)] if matches else []
