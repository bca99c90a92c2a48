"""``/api/search``: where a text stands in the episodes of a store."""

from __future__ import annotations

import asyncio
import re

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import reply, whole
from openhands_rl_plugin.contrib.studio.searching import SearchIndexes, progress_of
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import JsonObject, Trajectory

MOST_HITS = 100
_HITS = 20
_AROUND = 80
_LONGEST = 1000


class SearchResource:
    """The first place of a text in each episode, newest first."""

    def __init__(self, sources: StudioSources, indexes: SearchIndexes) -> None:
        self._sources = sources
        self._indexes = indexes

    async def get(self, request: Request) -> Response:
        """``total, indexed, hits: [{id, node, before, match, after}]``. Raises ``HTTPException`` 400."""
        text = request.query_params.get("text", "")[:_LONGEST]
        limit = whole(request, "limit", _HITS, least=1, most=MOST_HITS)
        storage = self._sources.store(request)
        index = await self._indexes.of(storage)
        if index is None:
            raise HTTPException(400, "the texts of this store are not searched")
        searched = progress_of(index)  # before the question: what is indexed meanwhile is not in the answer
        ids = list(await index.having(text))
        hits: list[JsonValue] = []
        pattern = _pattern(text)
        shown = TrajectoryFilter(ids=tuple(ids[:limit]), descending=True)
        async for trajectory, _ in storage.find(shown):
            hits.append(await asyncio.to_thread(_hit, trajectory, pattern))
        return reply(request, {"total": len(ids), "indexed": searched, "hits": hits})


def _pattern(text: str) -> re.Pattern[str]:
    words = re.findall(r"\w+", text)
    return re.compile(r"[\W_]+".join(map(re.escape, words)) or r"(?!)", re.IGNORECASE)


def _hit(trajectory: Trajectory, pattern: re.Pattern[str]) -> JsonObject:
    for at, node in enumerate(trajectory.nodes):
        for text in (node.message.content or "", *(call.arguments for call in node.message.tool_calls)):
            if found := pattern.search(text):
                start, end = found.span()
                return {
                    "id": trajectory.id,
                    "node": at,
                    "before": text[max(0, start - _AROUND) : start],
                    "match": text[start:end],
                    "after": text[end : end + _AROUND],
                }
    return {"id": trajectory.id, "node": None, "before": "", "match": "", "after": ""}
