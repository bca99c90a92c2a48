"""Many episodes: groups, resume, replacement of failed ones, and scores beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.protocols import Environment, TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, Observation, StrategySpec, Task
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout.episode import SessionRunner
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.scoring import rescore
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.testing import GridEnvironment, ScriptedEngine
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract

TASKS = tuple(Task(id=f"grid-{number}", environment="grid", limits=Limits(max_turns=3)) for number in range(3))


class Unreachable(GridEnvironment):
    async def reset(self, task: Task) -> Observation:
        raise InfrastructureError("nothing answers")


class Counting:
    """A runner that counts, and whose server is away for the first ``outages`` episodes."""

    def __init__(self, outages: int = 0, script: Sequence[str] = ("right", "right", "down")) -> None:
        self.started = 0
        self.outages = outages
        self.script = script

    def environment(self, request: EpisodeRequest) -> Environment:
        self.started += 1
        return Unreachable() if self.started <= self.outages else GridEnvironment()

    def runner(self, storage: TrajectoryStorage | None = None) -> SessionRunner:
        return SessionRunner(
            make_environment=self.environment,
            make_strategy=lambda request: StandardReActStrategy(),
            make_engine=lambda request: ScriptedEngine(self.script),
            strategy_spec=StrategySpec(name="StandardReAct"),
            base_model="script",
            storage=storage,
        )


def plan(**changes: object) -> RolloutPlan:
    return RolloutPlan.model_validate({"run_id": "run", "tasks": TASKS, "samples_per_task": 2, **changes})


async def test_every_task_is_rolled_out_as_one_group(tmp_path: Path) -> None:
    seen: list[str] = []
    async with FileTrajectoryStorage(tmp_path) as storage:
        trajectories = await roll_out(plan(), Counting().runner(), storage, lambda done: seen.append(done.id))
    assert [trajectory.task.id for trajectory in trajectories] == [task.id for task in TASKS for _ in range(2)]
    assert set(Counter(trajectory.group_id for trajectory in trajectories).values()) == {2}
    assert sorted(seen) == sorted({trajectory.id for trajectory in trajectories})


async def test_a_second_run_rolls_out_only_what_is_missing(tmp_path: Path) -> None:
    counting = Counting()
    async with FileTrajectoryStorage(tmp_path) as storage:
        first = await roll_out(plan(samples_per_task=1), counting.runner(), storage)
        second = await roll_out(plan(samples_per_task=2), counting.runner(), storage)
    assert counting.started == 6
    assert second[::2] == first


async def test_infrastructure_failures_are_replaced_and_kept(tmp_path: Path) -> None:
    counting = Counting(outages=2)
    async with FileTrajectoryStorage(tmp_path) as storage:
        trajectories = await roll_out(plan(samples_per_task=1, concurrency=1), counting.runner(), storage)
        failed = [found async for found, _ in storage.find(TrajectoryFilter(failed=True))]
    assert all(trajectory.failure is None for trajectory in trajectories)
    assert len(failed) == 2


async def test_a_server_that_stays_away_leaves_failures_not_zeros(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        trajectories = await roll_out(plan(samples_per_task=1, retries=0), Counting(outages=99).runner(), storage)
        report = await rescore(storage, ReturnReward())
        scored = [scores async for _, scores in storage.find()]
    assert all(trajectory.failure is not None for trajectory in trajectories)
    assert (report.scored, len(report.unscored)) == (0, 3)
    assert scored == [(), (), ()]
