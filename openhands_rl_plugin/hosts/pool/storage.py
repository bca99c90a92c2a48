"""A storage on the other side of a channel: the records of episodes go there as messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.hosts.pool.calls import Calls
from openhands_rl_plugin.hosts.pool.messages import Store, Stored


class PoolStorage:
    """The pool's storage, as a worker's runner uses it: a call returns when the pool has stored the record.

    One process writes for all workers: their episodes share a flush, and workers need no secrets of the storage.
    """

    def __init__(self, send: Callable[[Store], Awaitable[None]]) -> None:
        self._send = send
        self._calls = Calls[Stored]()

    async def add(self, trajectory: Trajectory) -> None:
        """As in ``TrajectoryStorage``."""
        await self._store(trajectory=trajectory)

    async def begin(self, start: EpisodeStart) -> None:
        """As in ``TrajectoryStorage``."""
        await self._store(start=start)

    async def grow(self, growth: EpisodeGrowth) -> None:
        """As in ``TrajectoryStorage``."""
        await self._store(growth=growth)

    async def end(self, end: EpisodeEnd) -> None:
        """As in ``TrajectoryStorage``."""
        await self._store(end=end)

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """As in ``TrajectoryStorage``."""
        return (await self._store(drop=tuple(trajectory_ids))).dropped

    def answered(self, answer: Stored) -> None:
        """Complete the call that ``answer`` belongs to."""
        self._calls.answered(answer.number, StorageError(answer.error) if answer.error else answer)

    def disconnect(self) -> None:
        """Fail the calls that wait for an answer: the pool is gone."""
        self._calls.disconnect(StorageError("the worker pool is gone"))

    async def _store(self, **record: Any) -> Stored:
        return await self._calls.ask(lambda number: self._send(Store(number=number, **record)))
