"""Many episodes: groups, resume, replacement of failed ones, and scores beside them."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.errors import GraderError, InfrastructureError
from openhands_rl_plugin.protocols import Environment
from openhands_rl_plugin.records import TrajectoryFilter
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout import RolloutPlan, group_by_task, roll_out
from openhands_rl_plugin.runners import SessionRunner
from openhands_rl_plugin.scoring import score_stored
from openhands_rl_plugin.storages.file import FileTrajectoryStorage
from openhands_rl_plugin.strategies.react import StandardReActStrategy
from openhands_rl_plugin.testing import GridEnvironment, ScriptedEngine
from openhands_rl_plugin.types import EpisodeRequest, Limits, Observation, Score, StrategySpec, Task, Trajectory

TASKS = tuple(Task(id=f"grid-{number}", environment="grid", limits=Limits(max_turns=3)) for number in range(3))


class Unreachable(GridEnvironment):
    async def reset(self, task: Task) -> Observation:
        raise InfrastructureError("nothing answers")


class Counting:
    """A runner that counts, and whose server is away for the first ``outages`` episodes."""

    def __init__(self, outages: int = 0) -> None:
        self.played = 0
        self.outages = outages

    def environment(self, request: EpisodeRequest) -> Environment:
        self.played += 1
        return Unreachable() if self.played <= self.outages else GridEnvironment()

    def runner(self) -> SessionRunner:
        return SessionRunner(
            make_environment=self.environment,
            make_strategy=lambda request: StandardReActStrategy(),
            make_engine=lambda request: ScriptedEngine(["right", "right", "down"]),
            strategy_spec=StrategySpec(name="StandardReAct"),
            base_model="script",
        )


def plan(**changes: object) -> RolloutPlan:
    return RolloutPlan.model_validate({"run_id": "run", "tasks": TASKS, "samples_per_task": 2, **changes})


async def test_every_task_is_played_as_one_group(tmp_path: Path) -> None:
    seen: list[str] = []
    async with FileTrajectoryStorage(tmp_path) as storage:
        played = await roll_out(plan(), Counting().runner(), storage, lambda done: seen.append(done.id))
    assert [trajectory.task.id for trajectory in played] == [task.id for task in TASKS for _ in range(2)]
    assert {len(members) for members in group_by_task(played).values()} == {2}
    assert sorted(seen) == sorted({trajectory.id for trajectory in played})


async def test_a_second_run_plays_only_what_is_missing(tmp_path: Path) -> None:
    counting = Counting()
    async with FileTrajectoryStorage(tmp_path) as storage:
        first = await roll_out(plan(samples_per_task=1), counting.runner(), storage)
        second = await roll_out(plan(samples_per_task=2), counting.runner(), storage)
    assert counting.played == 6
    assert second[::2] == first


async def test_infrastructure_failures_are_replaced_and_kept(tmp_path: Path) -> None:
    counting = Counting(outages=2)
    async with FileTrajectoryStorage(tmp_path) as storage:
        played = await roll_out(plan(samples_per_task=1, concurrency=1), counting.runner(), storage)
        failed = [found async for found, _ in storage.find(TrajectoryFilter(failed=True))]
    assert all(trajectory.failure is None for trajectory in played)
    assert len(failed) == 2


async def test_a_server_that_stays_away_leaves_failures_not_zeros(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        played = await roll_out(plan(samples_per_task=1, retries=0), Counting(outages=99).runner(), storage)
        report = await score_stored(storage, ReturnReward())
        scored = [scores async for _, scores in storage.find()]
    assert all(trajectory.failure is not None for trajectory in played)
    assert (report.scored, len(report.unscored)) == (0, 3)
    assert scored == [(), (), ()]


async def test_scores_are_given_once_a_version(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        await roll_out(plan(samples_per_task=1), Counting().runner(), storage)
        first = await score_stored(storage, ReturnReward())
        second = await score_stored(storage, ReturnReward())
    assert (first.scored, second.scored, second.already_scored) == (3, 0, 3)


async def test_a_grader_that_cannot_judge_leaves_no_score(tmp_path: Path) -> None:
    class Broken:
        version = "broken-1"

        async def __call__(self, trajectory: Trajectory) -> Score:
            raise GraderError("no report")

    async with FileTrajectoryStorage(tmp_path) as storage:
        await roll_out(plan(samples_per_task=1), Counting().runner(), storage)
        report = await score_stored(storage, Broken())
    assert report.scored == 0
    assert {failure.message for _, failure in report.unscored} == {"GraderError: no report"}
