"""A storage that is used from other threads, on its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.rollout.journal import EpisodeSink

# Seconds between checks whether the loop was closed.
_CHECK_INTERVAL = 1.0


class LoopBoundStorage:
    """An ``EpisodeSink`` that calls ``storage`` on its own event loop ``loop``.

    Raises what the storage raises, and ``InfrastructureError`` when that loop is closed before the call ends.
    """

    def __init__(self, storage: EpisodeSink, loop: asyncio.AbstractEventLoop) -> None:
        self._storage = storage
        self._loop = loop

    async def add(self, trajectory: Trajectory) -> None:
        """As in ``TrajectoryStorage``."""
        await self._on_loop(self._storage.add(trajectory))

    async def begin(self, start: EpisodeStart) -> None:
        """As in ``TrajectoryStorage``."""
        await self._on_loop(self._storage.begin(start))

    async def grow(self, growth: EpisodeGrowth) -> None:
        """As in ``TrajectoryStorage``."""
        await self._on_loop(self._storage.grow(growth))

    async def end(self, end: EpisodeEnd) -> None:
        """As in ``TrajectoryStorage``."""
        await self._on_loop(self._storage.end(end))

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """As in ``TrajectoryStorage``; nothing where the storage is a pipe to another process."""
        if (add := getattr(self._storage, "add_scores", None)) is not None:
            await self._on_loop(add(scores))

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """As in ``TrajectoryStorage``."""
        return await self._on_loop(self._storage.drop(trajectory_ids))

    async def _on_loop[T](self, call: Coroutine[Any, Any, T]) -> T:
        if self._loop is asyncio.get_running_loop():
            return await call
        if not self._loop.is_closed():
            answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
            # A stopped loop drops its tasks without an error.
            while not (await asyncio.wait([answer], timeout=_CHECK_INTERVAL))[0] and not self._loop.is_closed():
                pass
            if answer.done():
                return answer.result()
        call.close()
        raise InfrastructureError("the event loop of this episode was closed")
