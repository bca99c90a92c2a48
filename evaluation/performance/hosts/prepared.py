"""Workspaces made ahead of play: episodes an hour where set-up takes twice the play, with and without.

The runner of repository tasks is the real one; the checkout and the play are waits, so that only the order counts.

    python -m evaluation.performance.hosts.prepared [--episodes 12] [--setup 2.0] [--play 1.0]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, FailureKind, StrategySpec, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.evals.runs.llm import EvaluatedModel
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.stages import Stages
from openhands_rl_plugin.evals.runs.suites import Suite, swe_task
from openhands_rl_plugin.evals.runs.swe_runner import SweRunner
from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
from openhands_rl_plugin.evals.swe.types import Checkout, Instance
from openhands_rl_plugin.rollout.failed import failed_episode

_SUITE = Suite(name="waits", dataset="waits", split="test")
_BY = StrategySpec(name="StandardReAct")
Wait = Callable[[], Awaitable[None]]


class WaitingCheckouts:
    """A back end whose checkouts are empty folders, after a wait."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        await self._wait()
        directory.mkdir()
        return Checkout(directory=directory)


class WaitingHost:
    """Plays by waiting; its episodes have a failure, so that nothing is graded."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        assert workspace is not None and (workspace.root / workspace.repository).is_dir()
        await self._wait()
        ended = Failure(kind=FailureKind.ENVIRONMENT, message="it was only a wait", boundary="prepared")
        return failed_episode(request, ended, strategy=_BY, base_model="none", started=time.time())

    async def close(self) -> None:
        return None


async def waited(folder: Path, episodes: int, stages: Stages, setup: Wait, play: Wait) -> list[Trajectory]:
    """So many episodes through the runner."""
    storage: TrajectoryStorage = build("storages", "file", {"path": str(folder / "store")})
    plan = EvaluationPlan(
        suite=_SUITE.name,
        dataset=_SUITE.dataset,
        split=_SUITE.split,
        agent="RLAgent",
        model=EvaluatedModel(name="none", base_url="http://127.0.0.1:9/v1"),
        out=folder / "out",
    )
    runner = SweRunner(
        plan,
        WaitingHost(play),
        strategy=_BY,
        storage=storage,
        checkouts=cast(InstanceBackend, WaitingCheckouts(setup)),
        grader=None,
        scratch=folder / "scratch",
        reward=build("rewards", "tests"),
        stages=stages,
    )
    row: dict[str, Any] = {"repo": "a/b", "base_commit": "c", "problem_statement": "Wait.", "version": "1"}
    tasks = [swe_task(Instance.model_validate({**row, "instance_id": f"a__b-{n}"}), _SUITE) for n in range(episodes)]
    requests = [EpisodeRequest(task=each.task, run_id="waits", group_id=each.task.id, sample=0) for each in tasks]
    try:
        graded = await asyncio.gather(*map(runner.run, requests, tasks))
        return [each.trajectory for each in graded]
    finally:
        await storage.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--setup", type=float, default=2.0, help="seconds of a checkout")
    parser.add_argument("--play", type=float, default=1.0, help="seconds of an episode")
    args = parser.parse_args()
    hourly = dict[int, float]()
    for prepared in (0, 1, 2):
        stages = Stages(playing=1, grading=1, prepared=prepared)
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            played = waited(
                Path(folder),
                args.episodes,
                stages,
                lambda: asyncio.sleep(args.setup),
                lambda: asyncio.sleep(args.play),
            )
            assert len(asyncio.run(played)) == args.episodes
            hourly[prepared] = 3600 * args.episodes / (time.monotonic() - started)
        print(f"prepared {prepared}: {hourly[prepared]:.0f} episodes an hour, {hourly[prepared] / hourly[0]:.2f} times")


if __name__ == "__main__":
    main()
