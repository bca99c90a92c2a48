"""Opinions are looked up once, and what was said since is heard of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.testing.samples import sample_episode
from openhands_rl_plugin.trajectories.query import opinion_index
from openhands_rl_plugin.trajectories.query.language import parse_query
from openhands_rl_plugin.trajectories.query.resolving import resolved
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


def human(identity: str, reward: float | None) -> Score:
    return Score(trajectory_id=identity, reward=reward, reward_version="human-1")


async def found(storage: FileTrajectoryStorage, query: str) -> set[str]:
    where = await resolved(parse_query(query), storage)
    return {each.id async for each in storage.summaries(where)}


@pytest.mark.parametrize("few", [0, 500], ids=["remembered", "read each time"])
async def test_what_is_said_later_is_found(tmp_path: Path, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opinion_index, "_FEW", few)
    ids = [f"e{at}" for at in range(6)]
    async with FileTrajectoryStorage(tmp_path) as storage:
        assert await found(storage, "human:*") == set()
        await asyncio.gather(*(storage.add(sample_episode(each)) for each in ids))
        await storage.add_scores([human("e0", 1.0), human("e1", 0.0)])
        assert await found(storage, "human:>=1") == {"e0"}
        await storage.add_scores([human("e0", None), human("e2", 1.0)])
        assert await found(storage, "human:>=1") == {"e2"}
        await storage.add(sample_episode("late"))
        await storage.add_scores([human("late", 1.0), human("too early", 1.0)])
        assert await found(storage, "human:>=1") == {"e2", "late"}
        await storage.add(sample_episode("too early"))
        assert await found(storage, "human:>=1") == {"e2", "late", "too early"}
        assert await found(storage, "-human:*") == {"e0", "e3", "e4", "e5"}
        assert await found(storage, "human:1 id:late") == {"late"}
        await storage.add_scores([human(f"many {at}", 0.0) for at in range(3000)])
        await storage.add_scores([human("e3", 1.0)])
        assert await found(storage, "human:>=1") == {"e2", "late", "too early", "e3"}


async def test_scores_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Counting(FileTrajectoryStorage):
        async def scores(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[Score, ...]]:
            read.append(len(trajectory_ids))
            return await super().scores(trajectory_ids)

    monkeypatch.setattr(opinion_index, "_FEW", 0)
    async with Counting(tmp_path) as storage:
        await storage.add(sample_episode("a"))
        await storage.add(sample_episode("b"))
        await storage.add_scores([human("a", 1.0)])
        for _ in range(3):
            assert await found(storage, "human:1") == {"a"}
        await storage.add_scores([human("b", 1.0)])
        assert await found(storage, "human:1") == {"a", "b"}
        assert await storage.count(TrajectoryFilter()) == 2
    assert read == [2, 1], "all once, then what was scored"
