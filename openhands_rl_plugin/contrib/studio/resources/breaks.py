"""``/api/episodes/{id}/breaks``: where a prompt does not extend the turn before, why, and what it costs."""

from __future__ import annotations

import asyncio

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import reply
from openhands_rl_plugin.contrib.studio.shelf import EpisodeShelf
from openhands_rl_plugin.contrib.studio.token_text import TokenText
from openhands_rl_plugin.core.types import JsonObject, Trajectory
from openhands_rl_plugin.trajectories.drift.breaks import Break, breaks_of, context_of
from openhands_rl_plugin.trajectories.drift.causes import SETTINGS, cause_of

_BESIDE = 48
"""Tokens shown before and after a difference."""
_MOST_SHOWN = 256
MOST_BREAKS = 200


class BreakResource:
    """The prefix breaks of one episode."""

    def __init__(self, shelf: EpisodeShelf, text: TokenText) -> None:
        self._shelf = shelf
        self._text = text

    async def get(self, request: Request) -> Response:
        """``breaks``, at most 200, and their sums."""
        opened = await self._shelf.open(request)
        return reply(request, await asyncio.to_thread(self.answer, opened.trajectory), revision=opened.revision)

    def answer(self, trajectory: Trajectory) -> JsonObject:
        """The body of the reply."""
        found = list(breaks_of(trajectory))
        shown: list[JsonValue] = [self._break(trajectory, each) for each in found[:MOST_BREAKS]]
        return {
            "total": len(found),
            "repeated": sum(each.repeated for each in found),
            "tokenizer": self._text.problem,
            "breaks": shown,
        }

    def _break(self, trajectory: Trajectory, found: Break) -> JsonObject:
        cause = cause_of(trajectory, found, self._text.decode if self._text.problem is None else None)
        difference = found.difference
        context, spans = context_of(trajectory, found.previous)
        at, removed = difference.at, len(difference.removed)
        return {
            "node": found.node,
            "previous": found.previous,
            "cause": cause.name.lower(),
            "words": cause.value,
            "setting": SETTINGS[cause],
            "rewritten": found.rewritten,
            "starts_segment": found.starts_segment,
            "repeated": found.repeated,
            "turns": len(spans),
            "at": at,
            "context": len(context),
            "meets": difference.meets,
            "before": self._part(context[max(0, at - _BESIDE) : at]),
            "removed": self._part(difference.removed),
            "inserted": self._part(difference.inserted),
            "after": self._part(context[at + removed : at + removed + _BESIDE] if difference.meets else ()),
        }

    def _part(self, ids: tuple[int, ...]) -> JsonObject:
        shown = ids[:_MOST_SHOWN]
        text = "".join(piece or "" for piece in self._text.pieces(shown, 0, len(shown)))
        return {"count": len(ids), "ids": list(shown), "text": text if self._text.problem is None else None}
