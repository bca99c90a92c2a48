"""A store that an earlier release judged by the newest score of any version is judged by outcomes when it is opened."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from openhands_rl_plugin.core.records import (
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
    LabelKind,
    NodeMark,
    TrajectoryFilter,
    TrajectoryOrder,
)
from openhands_rl_plugin.core.types import Message, Node, StopReason, Trajectory, Usage
from openhands_rl_plugin.testing.storage import sample_episode, sample_score
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
        connection.execute("UPDATE episodes SET episode_return = 0.0, reward = 0.0 WHERE NOT scored")


async def test_it_is_judged_by_outcomes_and_takes_labels(tmp_path: Path) -> None:
    await as_before(tmp_path)
    async with FileTrajectoryStorage(tmp_path) as storage:
        found = {each.id: (each.reward, each.episode_return) async for each in storage.summaries()}
        assert found["graded"][0] == 1.0 and found["remarked"][0] == 0.5
        assert found["nobody"] == found["patched"] == (None, None) and found["shop"] == (None, 0.0)
        good = TrajectoryFilter(reward_at_least=0.4, sort=TrajectoryOrder.REWARD)
        assert [each.id async for each in storage.summaries(good)] == ["remarked", "graded"]
        label = Label(id="1", trajectory_id="nobody", kind=LabelKind.TAG, text="look again", at=1.0)
        await storage.add_labels([label])
        assert await storage.labels(["nobody", "graded"]) == (label,)
        assert [each.id async for each in storage.summaries(TrajectoryFilter(label="look again"))] == ["nobody"]


async def condensed_as_before(folder: Path) -> Trajectory:
    """A condensed episode with paid steps, stored while it ran, whose header counts its last segment only."""
    said = Message(role="assistant", content="go")
    asked = Message(role="user", content="?")
    paid = [Node(parent=None, message=asked)]
    for at in range(3):
        paid.append(Node(parent=2 * at, message=said, sampled=True, reward=0.25))
        paid.append(Node(parent=2 * at + 1, message=asked))
    paid.append(Node(parent=None, message=Message(role="user", content="so far: went on")))
    rewritten = {"history_rewritten": True}
    paid.append(Node(parent=7, message=said, sampled=True, reward=0.5, metadata=dict(rewritten)))
    usage = Usage(calls=4, steps=4)
    changes = {"nodes": tuple(paid), "head": 8, "usage": usage, "stop": StopReason.TERMINATED}
    episode = sample_episode("condensed", environment="shop", reward=0.0).model_copy(update=changes)
    late = tuple(NodeMark(index=at, reward=node.reward) for at, node in enumerate(paid) if node.sampled)
    early = tuple(node.model_copy(update={"reward": None}) for node in paid)
    async with FileTrajectoryStorage(folder) as storage:
        await storage.begin(EpisodeStart.of(episode))
        await storage.grow(EpisodeGrowth(trajectory_id=episode.id, first=0, nodes=early, head=8))
        await storage.grow(EpisodeGrowth(trajectory_id=episode.id, first=len(paid), head=8, marks=late))
        await storage.end(EpisodeEnd.of(episode))
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection, connection:
        connection.executescript("DROP TABLE labels; DROP TABLE names")
        connection.execute("UPDATE episodes SET turns = 1, episode_return = 0.5, reward = 0.5")
    return episode


async def test_a_condensed_episode_counts_all_its_segments(tmp_path: Path) -> None:
    episode = await condensed_as_before(tmp_path)
    async with FileTrajectoryStorage(tmp_path) as storage:
        await storage.check()
        (found,) = [each async for each in storage.summaries()]
        assert (found.turns, found.episode_return) == (4, 1.25)
        (whole,) = [each async for each, _ in storage.find(TrajectoryFilter(reward_at_least=1.25))]
        assert whole == episode and whole.episode_return == 1.25
