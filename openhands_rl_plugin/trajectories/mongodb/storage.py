"""Trajectories and scores in MongoDB: for several machines that write into one store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import batched
from types import TracebackType
from typing import Self

from openhands_rl_plugin.core.errors import DamagedError, from_extra
from openhands_rl_plugin.core.records import (
    DamagedRecord,
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
    StoreChanges,
    TrajectoryFilter,
    TrajectorySummary,
)
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.trajectories.mongodb.headers import asks_for_reward
from openhands_rl_plugin.trajectories.storages.guard import SecretGuard
from openhands_rl_plugin.trajectories.storages.packing import note_lost

Found = tuple[Trajectory, tuple[Score, ...]]

# Trajectories, or summaries, in memory at a time while a reader streams.
_READ_AHEAD = 16
_SUMMARIES_AHEAD = 256


class MongoDBTrajectoryStorage:
    """The database ``database_name`` of a MongoDB server (4.2 or later), which several machines may share.

    A call that writes returns when a majority of the replica set has the record in its journal (write concern
    ``majority`` with ``j``), so an acknowledged record survives a crash of the server, and half a record is never read.
    With ``durable=False`` it returns when the primary has it in memory (``w=1``): a crash of the server loses the last
    0.1 s, and a change of the primary what was not replicated yet.

    A server that is away is a ``StorageError`` after five seconds (``serverSelectionTimeoutMS``; the connection string
    may say otherwise). No error shows the password that is in the connection string.
    """

    def __init__(
        self,
        connection_string: str = "mongodb://localhost:27017/",
        database_name: str = "openhands_rl",
        durable: bool = True,
    ) -> None:
        with from_extra("mongodb", "pymongo"):
            from openhands_rl_plugin.trajectories.mongodb import reading as mongodb_reading
            from openhands_rl_plugin.trajectories.mongodb.client import MongoDatabase
            from openhands_rl_plugin.trajectories.mongodb.scores import ScoreBook
            from openhands_rl_plugin.trajectories.mongodb.writing import MongoEpisodeWriter
        self._guard = SecretGuard()
        self._lost: list[DamagedRecord] | None = None
        self._database = MongoDatabase(connection_string, database_name, durable=durable)
        self._writer = MongoEpisodeWriter(self._database)
        self._scores = ScoreBook(self._database)
        self._reading = mongodb_reading

    async def add(self, trajectory: Trajectory) -> None:
        """Store a finished episode; one that is finished already stays as it is. Raises ``StorageError``."""
        async with self._ready_to_write():
            await self._writer.add(self._guard.trajectory(trajectory))

    async def begin(self, start: EpisodeStart) -> None:
        """Open an episode; one whose id is known stays as it is. Raises ``StorageError``."""
        async with self._ready_to_write():
            await self._writer.begin(self._guard.start(start))

    async def grow(self, growth: EpisodeGrowth) -> None:
        """Append to an open episode; the head and the marks of the last call hold. Raises ``StorageError``."""
        async with self._ready_to_write():
            if not self._guard.knows(growth):
                for trajectory in await self._reading.load(self._database, (growth.trajectory_id,)):
                    self._guard.recall(trajectory)
            await self._writer.grow(self._guard.growth(growth))

    async def end(self, end: EpisodeEnd) -> None:
        """Close an open episode; a finished one stays as it is. Raises ``StorageError``."""
        async with self._ready_to_write():
            await self._writer.end(self._guard.end(end))

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """Forget unfinished episodes with their scores and return how many. Raises ``StorageError``."""
        async with self._ready_to_write():
            return await self._writer.drop(self._guard.drop(trajectory_ids))

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """Append judgements. After an error the first ones may be stored. Raises ``StorageError``."""
        if scores:
            async with self._ready_to_write():
                await self._scores.add(self._guard.scores(scores))

    async def add_labels(self, labels: Sequence[Label]) -> None:
        """Append labels; one whose id is known stays as it is. Raises ``StorageError``."""
        if labels:
            async with self._ready_to_write():
                await self._scores.add_labels(self._guard.labels(labels))

    async def labels(self, trajectory_ids: Sequence[str]) -> tuple[Label, ...]:
        """The labels of these episodes, oldest first. Raises ``StorageError``."""
        async with self._database.explained():
            return await self._scores.labels_of(trajectory_ids, self._lost)

    async def scores(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[Score, ...]]:
        """As in ``ReadsScores``. Raises ``StorageError``."""
        async with self._database.explained():
            found = await self._scores.of(trajectory_ids, self._lost)
        return {identity: tuple(scores) for identity, scores in found.items()}

    async def get(self, trajectory_id: str) -> Found | None:
        """One trajectory, finished or not, with its scores, oldest first, or ``None``. Raises ``StorageError``."""
        async for found in self.find(TrajectoryFilter(ids=(trajectory_id,), finished=None)):
            return found
        return None

    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        """Stream the matches with their scores (oldest first). By default in the order in which it was begun or added.

        A few records are held at a time. What is added while the stream is read is not part of it; an unfinished
        episode is read as it stands when the stream comes to it. Raises ``StorageError``, also for a damaged record.
        """
        where = where or TrajectoryFilter()
        for ids in batched(await self._ids(where, settled=asks_for_reward(where)), _READ_AHEAD):
            async with self._database.explained():
                trajectories = await self._loaded(ids)
                scores = await self._scores.of(ids, self._lost)
            for trajectory in trajectories:
                yield trajectory, tuple(scores.get(trajectory.id, ()))

    def skip_damaged(self) -> list[DamagedRecord]:
        """From now on, ``find`` and ``labels`` leave out what cannot be read, and add it to the returned list."""
        self._lost = self._lost or []
        return self._lost

    async def _loaded(self, ids: Sequence[str]) -> list[Trajectory]:
        try:
            return await self._reading.load(self._database, ids)
        except DamagedError as error:
            if len(ids) == 1:
                if self._lost is None:
                    raise DamagedError(f"episode {ids[0]!r}: {error}") from error
                note_lost(self._lost, DamagedRecord(what="episode", id=ids[0], cause=str(error)))
                return []
        return [found for identity in ids for found in await self._loaded((identity,))]

    async def summaries(self, where: TrajectoryFilter | None = None) -> AsyncIterator[TrajectorySummary]:
        """Like ``find``, without reading any node. Raises ``StorageError``."""
        for ids in batched(await self._ids(where or TrajectoryFilter(), settled=True), _SUMMARIES_AHEAD):
            async with self._database.explained():
                summaries = await self._reading.load_summaries(self._database, ids)
            for summary in summaries:
                yield summary

    async def count(self, where: TrajectoryFilter | None = None) -> int:
        """How many match, ``offset`` and ``limit`` aside. Raises ``StorageError``."""
        where = where or TrajectoryFilter()
        async with self._database.explained():
            if asks_for_reward(where):
                await self._scores.settle()
            return await self._reading.count(self._database, where)

    async def changed_since(self, cursor: str | None) -> StoreChanges:
        """As in ``TellsChanges``. Raises ``StorageError``."""
        async with self._database.explained():
            return await self._reading.store_changes(self._database, cursor)

    async def revision(self, trajectory_id: str | None = None) -> str:
        """As in ``TellsChanges``. Raises ``StorageError``."""
        async with self._database.explained():
            return await self._reading.stored_revision(self._database, trajectory_id)

    async def close(self) -> None:
        """Disconnect. The storage can be used again; it then connects again."""
        await self._database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ids(self, where: TrajectoryFilter, *, settled: bool) -> Sequence[str]:
        """The ids of the matches; ``settled``: every episode's newest score is known first."""
        async with self._database.explained():
            if settled:
                await self._scores.settle()
            return await self._reading.matching_ids(self._database, where)

    @asynccontextmanager
    async def _ready_to_write(self) -> AsyncIterator[None]:
        async with self._database.explained():
            if await self._database.prepare():
                await self._writer.sweep()
            yield
