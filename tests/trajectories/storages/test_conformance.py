"""The conformance suite passes the storages that are shipped, and names what is wrong with others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openhands_rl_plugin.core.records import EpisodeGrowth, TrajectoryFilter
from openhands_rl_plugin.testing import check_storage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage
from openhands_rl_plugin.trajectories.storages.log import Found

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("durable", [True, False])
async def test_the_file_storage_conforms(tmp_path: Path, durable: bool) -> None:
    await check_storage(lambda: FileTrajectoryStorage(tmp_path, durable=durable))
    with pytest.raises(AssertionError, match="empty at the start"):
        await check_storage(lambda: FileTrajectoryStorage(tmp_path, durable=durable))


class ReplacesScores(FileTrajectoryStorage):
    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        async for trajectory, scores in super().find(where):
            yield trajectory, scores[-1:]


class LosesMarks(FileTrajectoryStorage):
    async def grow(self, growth: EpisodeGrowth) -> None:
        await super().grow(growth.model_copy(update={"marks": ()}))


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [(ReplacesScores, "has the scores"), (LosesMarks, "has other nodes")],
)
async def test_wrong_storages_are_found(kind: type[FileTrajectoryStorage], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=complaint):
        await check_storage(lambda: kind(tmp_path, durable=False))
