"""``/api/episodes``: a page of the list."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.apps.studio.replies import Columns, columns, number, reply, whole
from openhands_rl_plugin.apps.studio.sources import StudioSources
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectorySummary

MOST_ROWS = 1000
_ROWS = 100


class ListResource:
    """The episodes of a store, page by page."""

    def __init__(self, sources: StudioSources) -> None:
        self._sources = sources

    async def get(self, request: Request) -> Response:
        """``store, total, offset, next, rows``."""
        storage = self._sources.store(request)
        offset = whole(request, "offset", 0, most=2**53)
        limit = whole(request, "limit", _ROWS, least=1, most=MOST_ROWS)
        where = TrajectoryFilter(finished=None, descending=True, offset=offset, limit=limit)
        found = [each async for each in storage.summaries(where)]
        total = await storage.count(where)
        return reply(request, {"total": total, "offset": offset, "next": None, "rows": rows_of(found)})


def rows_of(found: Sequence[TrajectorySummary]) -> Columns:
    """Summaries by columns."""
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
        "failure": [None if each.failure is None else each.failure.value for each in found],
        "reward": [number(each.reward) for each in found],
        "return": [number(each.episode_return) for each in found],
        "nodes": [each.nodes for each in found],
        "turns": [each.turns for each in found],
        "tokens": [each.usage.prompt_tokens + each.usage.completion_tokens for each in found],
        "started": [each.times.started for each in found],
        "finished": [each.times.finished for each in found],
    }
    return columns(rows)
