"""``/api/episodes`` and ``/api/facets``: a page of the list, and how many have which value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import Columns, columns, number, reply, whole
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.judgements import OPINIONS, labels_of, opinions_of, standing, verdict_word
from openhands_rl_plugin.core.protocols import TellsChanges
from openhands_rl_plugin.core.records import Label, TrajectoryFilter, TrajectoryOrder, TrajectorySummary
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.core.validation import unknown_name

MOST_ROWS = 1000
_ROWS = 100
_VALUES = 20
_BINS = 40
_MOST_COUNTED = 20_000

_FIELDS: Mapping[str, str] = {
    **{name: f"{name}_id" for name in ("run", "group", "task")},
    **{name: name for name in ("environment", "split", "strategy", "adapter", "stop", "contains")},
    "version": "policy_version",
    "failure": "failure_kind",
    "min_reward": "reward_at_least",
    "max_reward": "reward_at_most",
}
"""Parameter of a request -> the field of ``TrajectoryFilter``."""
_FACETS = ("stop", "failure", "adapter", "version", "task", "run", "split", "strategy", "environment")


def filter_of(request: Request) -> TrajectoryFilter:
    """The filter that the parameters give, of finished and unfinished episodes. Raises ``ValidationError``."""
    given = {field: value for name, field in _FIELDS.items() if (value := request.query_params.get(name))}
    return TrajectoryFilter.model_validate({"finished": None, **given})


class ListResource:
    """The episodes of a store that a filter finds."""

    def __init__(self, sources: StudioSources) -> None:
        self._sources = sources

    async def page(self, request: Request) -> Response:
        """``revision, total, offset, next, rows``. Raises ``HTTPException`` 400."""
        storage = self._sources.store(request)
        sort, descending = _order(request)
        limit = whole(request, "limit", _ROWS, least=1, most=MOST_ROWS)
        offset = whole(request, "offset", 0, most=2**53)
        page = {"sort": sort, "descending": descending, "limit": limit, "offset": offset}
        page["after"] = request.query_params.get("after") or None
        revision = await storage.revision() if isinstance(storage, TellsChanges) else ""
        where = filter_of(request)
        if request.query_params.get("unlabelled"):
            ids = [each.id async for each in storage.summaries(where)]
            known = {label.trajectory_id for label in standing(await labels_of(storage, ids))}
            where = where.model_copy(update={"ids": tuple(each for each in ids if each not in known)})
        where = where.model_copy(update=page)
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
            "rows": dict(rows_of(found, labels, said)),
        }
        return reply(request, body, revision=f"{revision} {request.url.query}" if revision else None)

    async def facets(self, request: Request) -> Response:
        """``facets: {NAME: [{value, count}]}``, ``rewards``, of the newest episodes."""
        newest = {"descending": True, "limit": _MOST_COUNTED}
        where = filter_of(request).model_copy(update=newest)
        found = [each async for each in self._sources.store(request).summaries(where)]
        facets: JsonObject = {}
        for name in _FACETS:
            counts = Counter(str(value) for each in found if (value := _value(each, name)) is not None)
            facets[name] = [{"value": value, "count": count} for value, count in counts.most_common(_VALUES)]
        return reply(request, {"facets": facets, "rewards": histogram([each.judged for each in found])})


def histogram(rewards: Sequence[float | None]) -> JsonObject:
    """Counts in bins of one width between ``low`` and ``high``; ``unknown`` have no reward."""
    known = [reward for reward in rewards if reward is not None and reward == reward]
    body: JsonObject = {"low": None, "high": None, "counts": [], "unknown": len(rewards) - len(known)}
    if not known:
        return body
    low, high = min(known), max(known)
    width = (high - low) / _BINS or 1.0
    counts = Counter(min(int((reward - low) / width), _BINS - 1) for reward in known)
    return body | {"low": low, "high": high, "counts": [counts[at] for at in range(_BINS)]}


def _value(summary: TrajectorySummary, name: str) -> object:
    match name:
        case "adapter":
            return summary.policy.adapter
        case "version":
            return summary.policy.version
        case "failure":
            return summary.failure and summary.failure.value
        case _:
            return getattr(summary, _FIELDS[name])


def _order(request: Request) -> tuple[TrajectoryOrder, bool]:
    """``?sort=-tokens``, by default the newest first."""
    said = request.query_params.get("sort") or "-stored"
    name = said.removeprefix("-")
    if name not in list(TrajectoryOrder):
        raise HTTPException(400, unknown_name("order", name[:80], [each.value for each in TrajectoryOrder]))
    return TrajectoryOrder(name), said != name


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
