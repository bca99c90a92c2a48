"""A store says that something changed, the same in SQLite and in MongoDB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import (
    EpisodeGrowth,
    EpisodeStart,
    Label,
    LabelKind,
)
from openhands_rl_plugin.testing.storage import sample_episode, sample_score, steps_of
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

Make = Callable[[], TrajectoryStorage]


@pytest.fixture(params=["sqlite", "mongodb"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "sqlite":
        return lambda: FileTrajectoryStorage(tmp_path)
    server, database = request.getfixturevalue("mongodb"), request.getfixturevalue("database")
    return lambda: MongoDBTrajectoryStorage(server.url, database.name)


async def test_the_revision_is_another_one_after_each_change(make: Make) -> None:
    storage, played = make(), sample_episode("new")
    start, first = steps_of(played)[:2]
    assert isinstance(start, EpisodeStart) and isinstance(first, EpisodeGrowth)
    label = Label(id="1", trajectory_id="new", kind=LabelKind.TAG, text="x", at=1.0)
    seen = [await storage.revision()]
    for change in (
        lambda: storage.begin(EpisodeStart.of(sample_episode("open", run="open"))),
        lambda: storage.begin(start),
        lambda: storage.grow(first),
        lambda: storage.add(played),
        lambda: storage.add_scores([sample_score("new", 1.0)]),
        lambda: storage.add_labels([label]),
        lambda: storage.drop(["open"]),
    ):
        await change()
        seen.append(await make().revision())
        assert seen[-1] == await storage.revision()
    assert len(set(seen)) == 8
    await storage.close()
