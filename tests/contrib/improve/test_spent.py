"""What a run took is counted from its stored episodes and its finished stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from openhands_rl_plugin.contrib.improve.price import Price, ServerRates, spent_by, spent_lines
from openhands_rl_plugin.core.types import Tokens
from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

PRICE = Price(
    episodes=4,
    evaluations=4,
    read=4000,
    sampled=2000,
    trained=9000,
    hours={"rollouts": 0.5, "tests": 0.1, "training": 1.0},
    ended_by="tokens",
    in_time=500,
    rates=ServerRates(read=1.0, written=1.0, at_once=1),
    training_memory=None,
    serving_memory=None,
    free_memory=None,
    disk=0,
    free_disk=1,
)


def record(name: str, minutes: float, **metrics: float) -> StageRecord:
    return StageRecord(name=name, adapter=None, metrics=metrics, started=100.0, finished=100.0 + 60 * minutes)


async def test_what_was_spent_stands_beside_what_was_said(tmp_path: Path) -> None:
    first, second = Tokens(prompt_ids=(1,) * 100, sampled_ids=(2,) * 30), Tokens(extends=True, sampled_ids=(2,) * 10)
    async with FileTrajectoryStorage(tmp_path) as storage:
        for at, run in enumerate(("r/evaluate-base", "r/iteration-1", "r/rollouts", "r/iteration-2", "other/rollouts")):
            episode = example_trajectory(2 * at)
            tokens = iter((first, second))
            nodes = tuple(
                node.model_copy(update={"tokens": next(tokens)}) if node.sampled else node for node in episode.nodes
            )
            await storage.add(episode.model_copy(update={"nodes": nodes, "run_id": run}))
        stages = (record("evaluate-base", 6), record("iteration-1", 12, training_seconds=540.0, tokens=450.0))
        spent = await spent_by(storage, LoopState(records=stages), "r")
    assert (spent.evaluations, spent.episodes) == (1, 2), "a stage that did not end and another run do not count"
    assert (spent.read, spent.sampled, spent.trained) == (300, 120, 450), "a prompt that goes on is read once"
    assert spent.hours == {"rollouts and tests": pytest.approx(0.15), "training": pytest.approx(0.15)}
    said = spent_lines(spent, PRICE)
    assert "300 of 4,000 read, 120 of 2,000 sampled, 450 of 9,000 trained" in said[2]
    assert "18 min of 1.6 h: rollouts and tests 9 min, training 9 min" in said[3]
