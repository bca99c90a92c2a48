"""What is readable of a damaged store, in a store that is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from openhands_rl_plugin.core.records import (
    DamagedRecord,
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
    TrajectoryFilter,
    TrajectorySummary,
)
from openhands_rl_plugin.core.types import Score, StopReason, Trajectory
from openhands_rl_plugin.trajectories.sqlite.salvage import SalvageReader
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


async def repair(damaged: Path, into: FileTrajectoryStorage) -> tuple[DamagedRecord, ...]:
    """Copy what is readable of the store in the folder ``damaged``, which is only read; returns what is not.

    An unfinished episode last grew now, as far as the copy knows. Raises ``StorageError`` when the copy cannot be
    written, or nothing of the old file can be read.
    """
    reader = await asyncio.to_thread(SalvageReader, damaged)
    try:
        for trajectory, scores in reader.episodes():
            await _copy(trajectory, into)
            await into.add_scores(scores)
        if labels := reader.labels():
            await into.add_labels(labels)
        return tuple(reader.lost)
    finally:
        reader.close()


async def _copy(trajectory: Trajectory, into: FileTrajectoryStorage) -> None:
    if trajectory.stop is not StopReason.UNFINISHED:
        await into.add(trajectory)
        return
    await into.begin(EpisodeStart.of(trajectory))
    growth = EpisodeGrowth(trajectory_id=trajectory.id, first=0, nodes=trajectory.nodes, head=trajectory.head)
    await into.grow(growth)


class ReadableStorage:
    """A damaged store for a command: it reads the ``copy`` of what is readable, and writes to the ``original``.

    Judgements are written to both, so that they are read again.
    """

    def __init__(self, original: FileTrajectoryStorage, copy: FileTrajectoryStorage) -> None:
        self._original = original
        self._copy = copy

    async def add(self, trajectory: Trajectory) -> None:
        """As in ``TrajectoryStorage``."""
        await self._original.add(trajectory)

    async def begin(self, start: EpisodeStart) -> None:
        """As in ``TrajectoryStorage``."""
        await self._original.begin(start)

    async def grow(self, growth: EpisodeGrowth) -> None:
        """As in ``TrajectoryStorage``."""
        await self._original.grow(growth)

    async def end(self, end: EpisodeEnd) -> None:
        """As in ``TrajectoryStorage``."""
        await self._original.end(end)

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """As in ``TrajectoryStorage``."""
        return await self._original.drop(trajectory_ids)

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """As in ``TrajectoryStorage``."""
        await self._original.add_scores(scores)
        await self._copy.add_scores(scores)

    async def add_labels(self, labels: Sequence[Label]) -> None:
        """As in ``TakesLabels``."""
        await self._original.add_labels(labels)
        await self._copy.add_labels(labels)

    async def labels(self, trajectory_ids: Sequence[str]) -> tuple[Label, ...]:
        """As in ``TakesLabels``."""
        return await self._copy.labels(trajectory_ids)

    def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[tuple[Trajectory, tuple[Score, ...]]]:
        """As in ``TrajectoryStorage``, of what is readable."""
        return self._copy.find(where)

    def summaries(self, where: TrajectoryFilter | None = None) -> AsyncIterator[TrajectorySummary]:
        """As in ``TrajectoryStorage``, of what is readable."""
        return self._copy.summaries(where)

    async def count(self, where: TrajectoryFilter | None = None) -> int:
        """As in ``TrajectoryStorage``, of what is readable."""
        return await self._copy.count(where)

    async def close(self) -> None:
        """As in ``TrajectoryStorage``; the copy is its maker's."""
        await self._original.close()
