"""An evaluation that somebody kills: real checkouts, sessions, stores and files, without OpenHands' imports.

python killed_run.py FOLDER INSTANCES     # prints what was left to do; goes on where the last one stopped
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from git_backend import FIX, GitBackend, git, make_instances

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    JsonObject,
    Message,
    Observation,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.evals.runs.evaluate import Evaluation
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.runner import EvalRunner
from openhands_rl_plugin.evals.runs.suites import Suite, swe_task
from openhands_rl_plugin.rollout.session import SessionRunner
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.testing import ScriptedEngine
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

TURNS = 3
SUITE = Suite(name="adders", dataset="adders", split="test")


class Repairs:
    """An environment of three turns in a checkout; the last one mends it."""

    def __init__(self, directory: Path, pace: random.Random) -> None:
        self._directory = directory
        self._pace = pace
        self._turn = 0

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=(Message(role="user", content=task.instruction),))

    async def step(self, action: Message) -> Observation:
        await asyncio.sleep(self._pace.uniform(0, 0.02))
        self._turn += 1
        done = self._turn == TURNS
        if done:
            git(self._directory, "apply", "-", stdin=FIX)
        return Observation(messages=(Message(role="user", content=f"turn {self._turn}"),), terminated=done)

    async def evidence(self) -> JsonObject:
        return {"git_patch": git(self._directory, "diff").stdout}

    async def close(self) -> None:
        return None


class SessionsInPlaces:
    """Plays with sessions in this process."""

    def __init__(self, storage: TrajectoryStorage, log: Path) -> None:
        self._storage = storage
        self._log = log
        self._pace = random.Random(7)

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        assert workspace is not None
        directory = workspace.root / workspace.repository
        runner = SessionRunner(
            make_environment=lambda _: Repairs(directory, self._pace),
            make_strategy=lambda _: StandardReActStrategy(),
            make_engine=lambda _: ScriptedEngine(["go on"] * TURNS),
            strategy_spec=StrategySpec(name="StandardReAct"),
            base_model="scripted",
            storage=self._storage,
        )
        trajectory = await runner.run(request)
        with self._log.open("a") as log:
            log.write(f"{request.sample} {request.task.id}\n")
        return trajectory

    async def close(self) -> None:
        return None


async def main(folder: Path, count: int) -> None:
    """Go on until everything is done."""
    if not (folder / "origin").exists():
        make_instances(folder / "new", 1)
        (folder / "new" / "origin").rename(folder / "origin")
    base = git(folder / "origin", "rev-parse", "HEAD").stdout.strip()
    example = make_instances(folder / f"other-{random.getrandbits(60)}", 1)[0]
    instances = [
        example.model_copy(
            update={
                "instance_id": f"owner__adder-{number}",
                "base_commit": base,
                "extra": {"origin": str(folder / "origin")},
            }
        )
        for number in range(count)
    ]
    serving = ServingSettings(model="scripted", base_url="http://127.0.0.1:1/v1")
    plan = EvaluationPlan(
        suite=SUITE,
        agent="RLAgent",
        settings=RLSettings(serving=serving, max_workers=4),
        out=folder / "out",
        runs=2,
        graders=2,
    )
    async with FileTrajectoryStorage(folder / "store") as storage:
        evaluation = Evaluation(plan, [swe_task(instance, SUITE) for instance in instances])
        print(evaluation.left, flush=True)
        backend = GitBackend(folder / "graded")
        player = EvalRunner(
            plan,
            SessionsInPlaces(storage, folder / "played.log"),
            strategy=StrategySpec(name="StandardReAct"),
            storage=storage,
            backend=backend,
            scratch=evaluation.scratch,
        )
        try:
            await evaluation.run(player)
        finally:
            evaluation.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
