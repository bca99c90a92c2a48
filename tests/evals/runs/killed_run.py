"""An evaluation that somebody kills: real checkouts, sessions, stores and files, without OpenHands' imports.

python killed_run.py FOLDER INSTANCES     # prints what was left to do; goes on where the last one stopped
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from git_backend import FIX, GitBackend, git, make_instances

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.files import write_file
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
from openhands_rl_plugin.evals.runs import evaluate
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.suites import Suite, swe_task
from openhands_rl_plugin.evals.swe.instances import read_instances, row_of
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.rollout.episode import SessionRunner
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
    """Rolls out with sessions in this process."""

    def __init__(self, spec: StrategySpec, storage: TrajectoryStorage, log: Path) -> None:
        self._spec = spec
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
            strategy_spec=self._spec,
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
    rows = folder / "rows.jsonl"
    if not rows.exists():
        made = make_instances(folder / f"made-{random.getrandbits(60)}", count)
        write_file(rows, "".join(f"{json.dumps(row_of(each))}\n" for each in made))
    serving = ServingSettings(model="scripted", base_url="http://127.0.0.1:1/v1")
    settings = RLSettings(serving=serving, max_workers=4)
    plan = EvaluationPlan(suite=SUITE, agent="RLAgent", settings=settings, out=folder / "out", runs=2, graders=2)

    @asynccontextmanager
    async def sessions(settings: RLSettings, options: HostOptions, *, storage: TrajectoryStorage, workers: int):
        yield SessionsInPlaces(options.strategy_spec(settings), storage, folder / "finished.log")

    evaluate.open_runner = sessions
    tasks = [swe_task(instance, SUITE) for instance in read_instances(rows)]
    backend = GitBackend(folder / "graded")
    async with FileTrajectoryStorage(folder / "store") as storage:
        await evaluate.evaluate(
            plan, tasks, storage=storage, backend=backend, started=lambda left: print(left, flush=True)
        )


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
