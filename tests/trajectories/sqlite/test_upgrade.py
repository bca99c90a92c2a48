"""A store that an earlier release judged by the newest score of any version is judged by outcomes when it is opened."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter, TrajectoryOrder
from openhands_rl_plugin.testing import sample_episode, sample_score
from openhands_rl_plugin.trajectories.sqlite.storage import FILE_NAME, FileTrajectoryStorage


async def as_before(folder: Path) -> None:
    """A store as version 0.2 left it: no labels, columns of the newest score, and a session's return of 0."""
    async with FileTrajectoryStorage(folder) as storage:
        for name, environment in (
            ("graded", "swe"),
            ("remarked", "gateway"),
            ("nobody", "workspace"),
            ("shop", "shop"),
        ):
            await storage.add(sample_episode(name, environment=environment, reward=0.0))
        patched = sample_episode("patched", environment="swe", reward=0.0)
        await storage.add(patched.model_copy(update={"evidence": {"git_patch": ""}}))
        await storage.add_scores([sample_score("graded", 1.0, "tests-1"), sample_score("graded", 0.25, "verifier-1@x")])
        await storage.add_scores(
            [sample_score("remarked", 0.5, "gateway-1"), sample_score("remarked", None, "remark-1")]
        )
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection, connection:
        connection.executescript("DROP TABLE labels; DROP TABLE names")
        connection.execute("UPDATE episodes SET score = 0.25, reward = 0.25, scored = 1 WHERE id = 'graded'")
        connection.execute("UPDATE episodes SET score = NULL, reward = NULL, scored = 1 WHERE id = 'remarked'")
        connection.execute("UPDATE episodes SET episode_return = 0.0, reward = 0.0, turns = 1 WHERE NOT scored")


async def test_it_is_judged_by_outcomes_and_takes_labels(tmp_path: Path) -> None:
    await as_before(tmp_path)
    async with FileTrajectoryStorage(tmp_path) as storage:
        summaries = [each async for each in storage.summaries()]
        assert {each.turns for each in summaries} == {2}, "it counted the last segment of a condensed one only"
        found = {each.id: (each.reward, each.episode_return) for each in summaries}
        assert found["graded"][0] == 1.0 and found["remarked"][0] == 0.5
        assert found["nobody"] == found["patched"] == (None, None) and found["shop"] == (None, 0.0)
        good = TrajectoryFilter(reward_at_least=0.4, sort=TrajectoryOrder.REWARD)
        assert [each.id async for each in storage.summaries(good)] == ["remarked", "graded"]
        label = Label(id="1", trajectory_id="nobody", kind=LabelKind.TAG, text="look again", at=1.0)
        await storage.add_labels([label])
        assert await storage.labels(["nobody", "graded"]) == (label,)
        assert [each.id async for each in storage.summaries(TrajectoryFilter(label="look again"))] == ["nobody"]
