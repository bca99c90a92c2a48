"""The conformance suite passes the storage that is shipped, and names what is wrong with others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from openhands_rl_plugin.core.records import (
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    TrajectoryFilter,
    TrajectoryOrder,
    TrajectorySummary,
)
from openhands_rl_plugin.core.types import Score, Trajectory, Usage
from openhands_rl_plugin.testing import check_storage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage
from openhands_rl_plugin.trajectories.storages.log import Found

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("durable", [True, False])
async def test_the_file_storage_conforms(tmp_path: Path, durable: bool) -> None:
    await check_storage(lambda: FileTrajectoryStorage(tmp_path, durable=durable))


class AddsTwice(FileTrajectoryStorage):
    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        async for found in super().find(where):
            yield found
            if found[0].id == "1":
                yield found


class ReplacesScores(FileTrajectoryStorage):
    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        async for trajectory, scores in super().find(where):
            yield trajectory, scores[-1:]


class LosesMarks(FileTrajectoryStorage):
    async def grow(self, growth: EpisodeGrowth) -> None:
        await super().grow(growth.model_copy(update={"marks": ()}))


class FillsGaps(FileTrajectoryStorage):
    async def grow(self, growth: EpisodeGrowth) -> None:
        found = await self.get(growth.trajectory_id)
        first = min(growth.first, len(found[0].nodes)) if found else growth.first
        await super().grow(growth.model_copy(update={"first": first}))


class ShowsUnfinished(FileTrajectoryStorage):
    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        where = where or TrajectoryFilter()
        async for found in super().find(where.model_copy(update={"finished": None})):
            yield found


class DropsEverything(FileTrajectoryStorage):
    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        await super().drop(trajectory_ids)
        return len(trajectory_ids)


class DropsNothing(FileTrajectoryStorage):
    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        return int("dropped" in trajectory_ids)


class IgnoresAdapters(FileTrajectoryStorage):
    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        where = where or TrajectoryFilter()
        async for found in super().find(where.model_copy(update={"adapter": None})):
            yield found


class SortsUnknownFirst(FileTrajectoryStorage):
    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        where = where or TrajectoryFilter()
        found = [each async for each in super().find(where)]
        if where.sort is TrajectoryOrder.REWARD:
            found.sort(key=lambda each: bool(each[1]) and each[1][-1].reward is None, reverse=True)
        for each in found:
            yield each


class CountsThePage(FileTrajectoryStorage):
    async def count(self, where: TrajectoryFilter | None = None) -> int:
        return len([one async for one in self.find(where)])


class SummariesLie(FileTrajectoryStorage):
    async def summaries(self, where: TrajectoryFilter | None = None) -> AsyncIterator[TrajectorySummary]:
        async for summary in super().summaries(where):
            yield summary.model_copy(update={"usage": Usage(), "turns": summary.nodes})


class ReadsWhatIsAdded(FileTrajectoryStorage):
    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        seen = set()
        for _ in range(2):
            async for found in super().find(where):
                if found[0].id not in seen:
                    yield found
                seen.add(found[0].id)


class ForgetsTheLast(FileTrajectoryStorage):
    async def close(self) -> None:
        await self.drop(["resumed"])
        await super().close()


class AcceptsAnything(FileTrajectoryStorage):
    async def add(self, trajectory: Trajectory) -> None:
        if trajectory.stop != "unfinished":
            await super().add(trajectory)


class KeepsTheUnfinished(FileTrajectoryStorage):
    async def add(self, trajectory: Trajectory) -> None:
        if await self.get(trajectory.id) is None:
            await super().add(trajectory)


class BeginsOver(FileTrajectoryStorage):
    async def begin(self, start: EpisodeStart) -> None:
        await self.drop([start.id])
        await super().begin(start)


class EndsEarly(FileTrajectoryStorage):
    async def end(self, end: EpisodeEnd) -> None:
        await super().end(end.model_copy(update={"evidence": {}}))


class ScoresTwice(FileTrajectoryStorage):
    async def add_scores(self, scores: Sequence[Score]) -> None:
        await super().add_scores([*scores, *scores])


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (AddsTwice, "returned .* not"),
        (ReplacesScores, "each once, oldest first"),
        (ScoresTwice, "each once, oldest first"),
        (LosesMarks, "has other nodes"),
        (FillsGaps, r"grow\(\) .* must raise StorageError"),
        (ShowsUnfinished, "returned .* not"),
        (DropsEverything, r"drop\(\) returned 3, not 1"),
        (DropsNothing, r"drop\(\): find.* returned"),
        (IgnoresAdapters, "'adapter': 'shop'"),
        (SortsUnknownFirst, "unknown rewards last"),
        (CountsThePage, "leave offset and limit aside"),
        (SummariesLie, "does not say what the trajectory says: turns, usage"),
        (ReadsWhatIsAdded, "while a stream is read"),
        (ForgetsTheLast, r"after close\(\)"),
        (AcceptsAnything, r"add\(\) of .* must raise StorageError"),
        (KeepsTheUnfinished, r"add\(\): find.*'replaced'"),
        (BeginsOver, r"begin\(\): find.*'played'"),
        (EndsEarly, "has other evidence"),
    ],
)
async def test_wrong_storages_are_found(kind: type[FileTrajectoryStorage], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=complaint):
        await check_storage(lambda: kind(tmp_path, durable=False))


async def test_a_store_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    await check_storage(lambda: FileTrajectoryStorage(tmp_path, durable=False))
    with pytest.raises(AssertionError, match="empty at the start"):
        await check_storage(lambda: FileTrajectoryStorage(tmp_path, durable=False))
