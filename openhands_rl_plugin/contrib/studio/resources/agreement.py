"""``/api/agreement``: how far the people who labelled the same episodes agree, and where they do not."""

from __future__ import annotations

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import columns, number, reply
from openhands_rl_plugin.contrib.studio.searching import SearchIndexes
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.browsing.listing import Browsable
from openhands_rl_plugin.core.judgements import labels_of
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.trajectories.query.language import parse_query
from openhands_rl_plugin.trajectories.query.resolving import resolved
from openhands_rl_plugin.trajectories.view.agreement import Agreement, agreement_of

_MOST_DISPUTED = 500


class AgreementResource:
    """The agreement of a store's labellers."""

    def __init__(self, sources: StudioSources, indexes: SearchIndexes) -> None:
        self._sources = sources
        self._indexes = indexes

    async def get(self, request: Request) -> Response:
        """Of the episodes that ``?q=`` finds, by default all. Raises ``ConfigError``, and ``HTTPException`` 404."""
        storage = self._sources.store(request)
        query = parse_query(request.query_params.get("q", ""))
        if not isinstance(storage, Browsable):
            raise HTTPException(404, f"{type(storage).__name__} does not list its labels")
        if query.terms or query.notes or query.texts:
            where = await resolved(query, storage, await self._indexes.of(storage, query))
            labels = await labels_of(storage, [each.id async for each in storage.summaries(where)])
        else:
            labels = await storage.all_labels()
        return reply(request, answer_of(agreement_of(labels)))


def answer_of(found: Agreement) -> JsonObject:
    """``labellers``, ``pairs`` and ``disputed`` are tables."""
    shown = found.disputed[:_MOST_DISPUTED]
    labellers: dict[str, list[JsonValue]] = {
        "name": [*found.labellers],
        "episodes": [*found.labellers.values()],
    }
    pairs: dict[str, list[JsonValue]] = {
        "first": [pair.first for pair in found.pairs],
        "second": [pair.second for pair in found.pairs],
        "episodes": [pair.episodes for pair in found.pairs],
        "agree": [pair.agree for pair in found.pairs],
        "kappa": [number(pair.kappa) for pair in found.pairs],
    }
    disputed: dict[str, list[JsonValue]] = {
        "id": [each.trajectory_id for each in shown],
        "said": [{name: number(value) for name, value in each.said.items()} for each in shown],
    }
    return {
        "episodes": found.episodes,
        "agree": found.agree,
        "share": number(found.share),
        "kappa": number(found.kappa),
        "labellers": dict(columns(labellers)),
        "pairs": dict(columns(pairs)),
        "total": len(found.disputed),
        "disputed": dict(columns(disputed)),
    }
