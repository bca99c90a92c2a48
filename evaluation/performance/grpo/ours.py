"""This project's side of ``grpo`` and the held-out episodes of both, by the demo's own code.

``python -m evaluation.performance.grpo.ours learn|measure JOB``, for a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from evaluation.performance.grpo.budget import CpuBudget, Job
from openhands_rl_plugin.apps.demo_model import NAME
from openhands_rl_plugin.contrib.demo.runs import ADAPTER, DemoOptions
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE, AdapterStore
from openhands_rl_plugin.training.loop.loop import LoopListener
from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

WARM_START = "evaluate-warm-start"
_ITERATION = "iteration-"
_ENDLESS = 1_000


class Clock(LoopListener):
    """The budget begins with the first iteration; an iteration's adapter counts when its stage has ended."""

    def __init__(self, budget: CpuBudget, adapters: Path) -> None:
        self._budget = budget
        self._adapters = adapters

    def stage_started(self, name: str) -> None:
        """A stage begins."""
        if name.startswith(_ITERATION):
            self._budget.begin()

    def stage_finished(self, record: StageRecord) -> None:
        """A stage ended."""
        if record.name.startswith(_ITERATION) and record.adapter is not None:
            step = int(record.name.removeprefix(_ITERATION)) + 1
            self._budget.mark(step, self._adapters / record.adapter, record.metrics)


def learn(job: Job) -> None:
    """Reinforcement as in the demo, until the budget is spent, which ends the process."""
    from openhands_rl_plugin.contrib.demo.runs import run_demo

    begin_after_warm_start(job, job.out)
    budget = CpuBudget(60 * job.minutes, job.out / "marks.jsonl")
    budget.end_process_when_spent()
    options = DemoOptions(
        run_directory=job.out,
        model_directory=job.model,
        seed=job.seed,
        held_out=job.held_out,
        iterations=_ENDLESS,
        tasks_per_iteration=job.tasks,
        samples_per_task=job.samples,
    )
    run_demo(options, Clock(budget, job.out / "adapters"))


def measure(job: Job) -> None:
    """Run the demo's evaluation after SFT with the job's adapter; ``held_out_returns`` reads the result."""
    from openhands_rl_plugin.contrib.demo.runs import run_demo

    begin_after_warm_start(job, job.out, last="warm-start")
    options = DemoOptions(
        run_directory=job.out, model_directory=job.model, seed=job.seed, held_out=job.held_out, iterations=0
    )
    run_demo(options)


def begin_after_warm_start(job: Job, directory: Path, last: str = WARM_START) -> None:
    """Make a run directory in the state after the stage ``last``, with the job's adapter as its first version."""
    if (directory / "state.json").exists():
        return
    store = AdapterStore(directory / "adapters")

    def copy(target: Path) -> None:
        for name in ("adapter_config.json", WEIGHTS_FILE):
            shutil.copyfile(job.adapter / name, target / name)

    adapter = store.create(ADAPTER, copy, base_model=NAME)
    state = LoopState()
    for record in LoopState.load(job.run / "state.json").records:
        name = adapter.name if record.adapter is not None else None
        state = state.with_record(record.model_copy(update={"adapter": name}))
        if record.name == last:
            break
    state.save(directory / "state.json")


def has_episodes(directory: Path) -> bool:
    """Whether the run directory has a storage. It is not opened, because that would create one."""
    return (directory / "trajectories").is_dir()


def held_out_returns(directory: Path, seed: int, stage: str) -> dict[str, float]:
    """Task -> return, of a stage's episodes that did not fail."""

    async def read() -> dict[str, float]:
        async with FileTrajectoryStorage(directory / "trajectories") as storage:
            where = TrajectoryFilter(run_id=f"demo-{seed}/{stage}", failed=False)
            return {trajectory.task.id: trajectory.episode_return async for trajectory, _ in storage.find(where)}

    return asyncio.run(read())


def main() -> None:
    """Do the job of the command line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from openhands_rl_plugin.models.generator.threads import prepare_threads

    prepare_threads()
    {"learn": learn, "measure": measure}[sys.argv[1]](Job.model_validate_json(sys.argv[2]))


if __name__ == "__main__":
    main()
