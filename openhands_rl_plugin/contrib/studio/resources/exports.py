"""``/api/export``: chosen episodes as one page that opens from a file, without a server and without a network."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.document import single_file
from openhands_rl_plugin.contrib.studio.noted import NoteShelf
from openhands_rl_plugin.contrib.studio.replies import reply
from openhands_rl_plugin.contrib.studio.resources.breaks import BreakResource
from openhands_rl_plugin.contrib.studio.resources.episode import bodies_of, header_of, tokens_of
from openhands_rl_plugin.contrib.studio.resources.listing import rows_of
from openhands_rl_plugin.contrib.studio.shelf import EpisodeShelf, Opened
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.contrib.studio.token_text import TokenText
from openhands_rl_plugin.core.judgements import opinions
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectorySummary
from openhands_rl_plugin.core.types import JsonObject

MOST_BYTES = 50 * 1024 * 1024
MOST_EPISODES = 1000
_UNCHANGED = "!~*'()"
"""What ``encodeURIComponent`` leaves as it is, beside letters, digits and ``-_.``."""


class ExportResource:
    """What the API answers of the chosen episodes, by its addresses."""

    def __init__(self, shelf: EpisodeShelf, text: TokenText, notes: NoteShelf | None = None) -> None:
        self._shelf = shelf
        self._notes = notes or NoteShelf(StudioSources())
        self._breaks = BreakResource(shelf, text)
        self._text = text

    @classmethod
    async def page(cls, found: Sequence[Opened], text: TokenText) -> str:
        """The page of these episodes. Raises ``HTTPException`` 413."""
        return single_file(await cls(EpisodeShelf(StudioSources()), text).data(found))

    async def get(self, request: Request) -> Response:
        """The data, or with ``?html=1`` the page. Raises ``HTTPException`` 400, 404, and 413 for more than 50 MB."""
        ids = list(dict.fromkeys(each for each in request.query_params.get("ids", "").split(",") if each))
        if not ids or len(ids) > MOST_EPISODES:
            raise HTTPException(400, f"name 1 to {MOST_EPISODES} episodes: ids=ID,ID")
        opened = [await self._shelf.open(request, identity) for identity in ids[:1]]
        data = await self.data([each async for each in self._all(request, ids, opened)])
        if request.query_params.get("html"):
            page = single_file(data)
            headers = {"Content-Disposition": 'attachment; filename="episodes.html"', "Cache-Control": "no-store"}
            return Response(page, media_type="text/html; charset=utf-8", headers=headers)
        return reply(request, data)

    async def _all(self, request: Request, ids: Sequence[str], first: Sequence[Opened]) -> AsyncIterator[Opened]:
        for each in first:
            yield each
        for identity in ids[len(first) :]:
            yield await self._shelf.open(request, identity)

    async def data(self, found: Sequence[Opened]) -> JsonObject:
        """Address below ``/api/`` -> what is answered there, not cut into pages. Raises ``HTTPException`` 413."""
        data: JsonObject = {"episodes": await self.listed(found), "export": {"version": 1, "made": time.time()}}
        size = 0
        for each in found:
            for address, body in self.answers(each):
                data[address] = body
                size += len(json.dumps(body, ensure_ascii=False))
                if size > MOST_BYTES:
                    raise HTTPException(413, f"the export would have more than {MOST_BYTES // 2**20} MB; choose fewer")
        return data

    @staticmethod
    async def listed(found: Sequence[Opened]) -> JsonObject:
        """The list of these episodes. Raises ``HTTPException`` 404."""
        labels = [label for each in found for label in each.labels]
        said = {each.trajectory.id: opinions(each.scores) for each in found}
        rows = rows_of([await _summary(each.storage, each.trajectory.id) for each in found], labels, said)
        return {"revision": "", "total": len(found), "offset": 0, "next": None, "rows": dict(rows)}

    def answers(self, opened: Opened) -> Iterator[tuple[str, JsonObject]]:
        """What the API answers of one episode."""
        trajectory = opened.trajectory
        base, nodes = f"episodes/{quote(trajectory.id, safe=_UNCHANGED)}", trajectory.nodes
        yield base, header_of(opened)
        yield f"{base}/breaks", self._breaks.answer(trajectory)
        yield f"{base}/nodes", bodies_of(nodes, range(len(nodes)), len(nodes), most=MOST_BYTES)
        for at, node in enumerate(nodes):
            if node.tokens is not None:
                notes = self._notes.of(trajectory.id, at, len(node.tokens.sampled_ids))
                yield f"{base}/nodes/{at}/tokens", tokens_of(node, at, 0, self._text, MOST_BYTES, notes)


async def _summary(storage: TrajectoryStorage, identity: str) -> TrajectorySummary:
    async for each in storage.summaries(TrajectoryFilter(ids=(identity,), finished=None)):
        return each
    raise HTTPException(404, f"the episode {identity[:80]!r} is gone")
