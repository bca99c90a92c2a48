"""``/api/episodes`` and ``/api/facets``: a page of the list, and how many have which value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import Columns, columns, number, reply, whole
from openhands_rl_plugin.contrib.studio.searching import SearchIndexes, progress_of
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.browsing.listing import Browsable, FacetCount, RewardHistogram
from openhands_rl_plugin.core.browsing.terms import Column, Match, Term
from openhands_rl_plugin.core.judgements import OPINIONS, labels_of, opinions_of, standing, verdict_word, words_of
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter, TrajectoryOrder, TrajectorySummary
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.core.validation import unknown_name
from openhands_rl_plugin.trajectories.query.language import parse_query
from openhands_rl_plugin.trajectories.query.printing import column_clause, query_text
from openhands_rl_plugin.trajectories.query.query import Note, NoteTerm, Query
from openhands_rl_plugin.trajectories.query.resolving import resolved

MOST_ROWS = 1000
_ROWS = 100
_MOST_VALUES = 200
_VALUES = 20
_BINS = 40
_FACETS = (Column.RUN, Column.ADAPTER, Column.STOP, Column.FAILED)


class ListResource:
    """The episodes of a store that a query finds."""

    def __init__(self, sources: StudioSources, indexes: SearchIndexes) -> None:
        self._sources = sources
        self._indexes = indexes

    async def page(self, request: Request) -> Response:
        """``revision, total, offset, next, query, rows``. Raises ``ConfigError`` for a query that cannot be read."""
        storage = self._sources.store(request)
        query = parse_query(request.query_params.get("q", ""))
        sort, descending = _order(request, query)
        limit = whole(request, "limit", _ROWS, least=1, most=MOST_ROWS)
        offset = whole(request, "offset", 0, most=2**53)
        page = {"sort": sort, "descending": descending, "limit": limit, "offset": offset}
        page["after"] = request.query_params.get("after") or None
        revision = await _revision(storage)
        index = await self._indexes.of(storage, query)
        searched = progress_of(index)  # before the question: what is indexed meanwhile is not in the answer
        where = (await resolved(query, storage, index)).model_copy(update=page)
        total = await storage.count(where)
        found = [each async for each in storage.summaries(where)]
        ids = [each.id for each in found]
        labels, said = await labels_of(storage, ids), await opinions_of(storage, ids)
        more = len(found) == limit and total > limit
        body: JsonObject = {
            "revision": revision,
            "total": total,
            "offset": offset,
            "next": found[-1].id if found and more else None,
            "indexed": searched,
            "rows": dict(rows_of(found, labels, said)),
        }
        settled = f"{revision} {request.url.query}" if revision and index is None else None
        return reply(request, body, revision=settled)

    async def facets(self, request: Request) -> Response:
        """``facets: {NAME: [{value, count, query}]}``, ``rewards``. Raises ``ConfigError`` as ``page`` does."""
        storage = self._sources.store(request)
        query = parse_query(request.query_params.get("q", ""))
        names = [name for name in request.query_params.get("by", "").split(",") if name] or list(_FACETS)
        most = whole(request, "most", _VALUES, least=1, most=_MOST_VALUES)
        known = [Note.LABEL.value, *(each.value for each in Column)]
        for name in names:
            if name not in known:
                raise HTTPException(400, f"by: {unknown_name('column', name[:80], known)}")
        if not isinstance(storage, Browsable):
            raise HTTPException(404, f"{type(storage).__name__} counts no values")
        revision = await storage.revision()
        where = await resolved(query, storage, await self._indexes.of(storage, query))
        by = [Column(name) for name in names if name != Note.LABEL]
        counts = await storage.facets(where, by, most)
        wanted = request.query_params.get("rewards") != "0"
        histogram = await storage.rewards(where, _BINS) if wanted else RewardHistogram()
        facets: JsonObject = {
            column.value: [_facet(column, each) for each in found] for column, found in zip(by, counts, strict=True)
        }
        if Note.LABEL in names:
            facets[Note.LABEL.value] = await _label_facet(storage, where, most)
        body: JsonObject = {
            "revision": revision,
            "facets": facets,
            "rewards": histogram.model_dump(mode="json"),
        }
        return reply(request, body)


async def _label_facet(storage: TrajectoryStorage, where: TrajectoryFilter, most: int) -> list[JsonValue]:
    """The kinds of the labels that hold, ``good``, ``bad``, and the tags, each with how many of the
    matches have it."""
    assert isinstance(storage, Browsable), "it was asked for its columns too"
    about: dict[str, set[str]] = {}
    labels = standing(await storage.all_labels())
    for identity, words in words_of(
        label if label.kind is LabelKind.TAG else _wordless(label) for label in labels
    ).items():
        for value in words - {""}:
            about.setdefault(value, set()).add(identity)
    frequent = sorted(about, key=lambda value: (-len(about[value]), value))[:most]
    found: list[JsonValue] = []
    for value in frequent:
        named = Term(column=Column.ID, any_of=tuple(Match(text=each) for each in sorted(about[value])))
        count = await storage.count(where.model_copy(update={"terms": (*where.terms, named)}))
        clause = query_text(Query(notes=(NoteTerm(note=Note.LABEL, any_of=(Match(text=value),)),)))
        if count:
            found.append({"value": value, "count": count, "query": clause})
    return found


def _wordless(label: Label) -> Label:
    """Remarks and notes are too many to choose from."""
    return label.model_copy(update={"text": ""})


async def _revision(storage: TrajectoryStorage) -> str:
    return await storage.revision() if isinstance(storage, Browsable) else ""


def _order(request: Request, query: Query) -> tuple[TrajectoryOrder, bool]:
    """``?sort=-tokens``, or that of the query, or the newest first."""
    said = request.query_params.get("sort", "")
    if said:
        named = parse_query(f"sort:{json.dumps(said)[1:-1]}")
        if named.sort is not None:
            return named.sort, named.descending
    return (TrajectoryOrder.STORED, True) if query.sort is None else (query.sort, query.descending)


def _facet(column: Column, found: FacetCount) -> JsonObject:
    return {"value": found.value, "count": found.count, "query": column_clause(column, found.value)}


def rows_of(
    found: Sequence[TrajectorySummary], labels: Sequence[Label], said: Mapping[str, Mapping[str, float]]
) -> Columns:
    """Summaries by columns; ``labels``: those that hold, by kind or as ``good`` and ``bad``; ``said``: ``opinions``."""
    kinds: dict[str, list[JsonValue]] = {}
    for label in standing(labels):
        for about in {label.trajectory_id, label.other} - {None}:
            kinds.setdefault(str(about), []).append(verdict_word(label) or label.kind.value)
    rows: dict[str, list[JsonValue]] = {
        "id": [each.id for each in found],
        "run": [each.run_id for each in found],
        "group": [each.group_id for each in found],
        "task": [each.task_id for each in found],
        "environment": [each.environment for each in found],
        "split": [each.split for each in found],
        "strategy": [each.strategy for each in found],
        "model": [each.policy.base_model for each in found],
        "adapter": [each.policy.adapter for each in found],
        "version": [each.policy.version for each in found],
        "stop": [each.stop.value for each in found],
        "failed": [None if each.failure is None else each.failure.value for each in found],
        "reward": [number(each.reward) for each in found],
        "return": [number(each.episode_return) for each in found],
        **{name: [number(said.get(each.id, {}).get(name)) for each in found] for name in OPINIONS},
        "nodes": [each.nodes for each in found],
        "turns": [each.turns for each in found],
        "tokens": [each.usage.prompt_tokens + each.usage.completion_tokens for each in found],
        "seconds": [round(each.times.finished - each.times.started, 3) for each in found],
        "started": [each.times.started for each in found],
        "finished": [each.times.finished for each in found],
        "labels": [kinds.get(each.id) for each in found],
    }
    return columns(rows)
