"""Runs an evaluation plan: opens settings, host, runner and store, and runs every task in every run."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import remove_tree
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import FailureKind, JsonObject
from openhands_rl_plugin.evals.runs.outcome import EvalTask, GradedEpisode, Outcome, outcome_of
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, RunSpec
from openhands_rl_plugin.evals.runs.run_files import (
    RunFiles,
    check_same_settings,
    metadata_of,
    outcome_of_row,
    output_row,
    write_run_report,
)
from openhands_rl_plugin.evals.runs.runner import EvalRunner
from openhands_rl_plugin.evals.runs.suites import REPLIES, own_suite
from openhands_rl_plugin.evals.swe.types import InstanceBackend, VerdictKind
from openhands_rl_plugin.hosts.pool import open_runner
from openhands_rl_plugin.hosts.shared.sessions import RL_AGENT, HostOptions

SCRATCH = ".work"
"""The folder of checkouts below that of the evaluation; leftovers of a killed process are removed."""

_BACKOFF = Backoff(first=0.5, longest=10.0)

OnOutcome = Callable[[Outcome], None]


class Work(NamedTuple):
    """The tasks of one run that are not finished."""

    run: RunSpec
    files: RunFiles
    metadata: JsonObject
    eval_tasks: tuple[EvalTask, ...]


class Evaluation:
    """The runs of a plan over ``eval_tasks``; finished attempts are skipped. One process at a time; close it.

    ``retry_failed`` repeats attempts that ended with an infrastructure failure. Raises ``ConfigError``, also for runs
    that were made with other settings.
    """

    def __init__(self, plan: EvaluationPlan, eval_tasks: Sequence[EvalTask], *, retry_failed: bool = False) -> None:
        self.plan = plan
        self.eval_tasks = tuple(eval_tasks)
        self.work: tuple[Work, ...] = ()
        for run in plan.each_run():
            check_same_settings(plan, run)
        for run in plan.each_run():
            files = RunFiles(plan.run_directory(run))
            if retry_failed:
                files.forget(lambda row: outcome_of_row(row).kind is VerdictKind.INFRASTRUCTURE)
            metadata = metadata_of(plan, run, time.time())
            left = tuple(eval_task for eval_task in eval_tasks if eval_task.task.id not in files.done)
            self.work += (Work(run, files, metadata, left),)
        remove_tree(self.scratch)

    @property
    def scratch(self) -> Path:
        """The runner's folder for temporary files."""
        return self.plan.out / SCRATCH

    @property
    def left(self) -> int:
        """Attempts that are not done yet."""
        return sum(len(work.eval_tasks) for work in self.work)

    async def run(self, runner: EvalRunner, on_outcome: OnOutcome | None = None) -> None:
        """Run what is left, then write predictions and run reports. ``on_outcome`` gets attempts that are stored.

        An interrupted evaluation keeps finished attempts. Raises ``ConfigError`` and ``StorageError``.
        """
        for work in self.work:
            work.files.write_metadata(work.metadata)

        async def attempt(work: Work, eval_task: EvalTask) -> None:
            graded = await self._attempt(runner, work.run, eval_task)
            outcome = outcome_of(graded, work.run.index)
            if self.plan.completions:
                await asyncio.to_thread(work.files.write_completions, graded.trajectory)
            row = await asyncio.to_thread(output_row, graded, eval_task, outcome, work.metadata)
            await asyncio.to_thread(work.files.append, row)
            if on_outcome is not None:
                on_outcome(outcome)

        try:
            async with asyncio.TaskGroup() as group:
                for work in self.work:
                    for eval_task in work.eval_tasks:
                        group.create_task(attempt(work, eval_task))
        except ExceptionGroup as errors:
            # What stops an evaluation (a full disk, say) stops every attempt in the same way: one error is enough.
            raise errors.exceptions[0] from errors
        for work in self.work:
            write_run_report(
                work.files.directory, self.plan.model, [eval_task.task.id for eval_task in self.eval_tasks]
            )

    def close(self) -> None:
        """Release the locks of the runs, and remove remaining checkouts."""
        for work in self.work:
            work.files.close()
        remove_tree(self.scratch)

    async def _attempt(self, runner: EvalRunner, run: RunSpec, eval_task: EvalTask) -> GradedEpisode:
        """The first attempt without an infrastructure failure, or the last one.

        Failed attempts of an earlier process are skipped and do not count as retries.
        """
        task = eval_task.task.model_copy(update={"limits": eval_task.task.limits or self.plan.limits()})
        started, attempt, failures = time.time(), 0, 0
        while True:
            graded = await runner.run(self.plan.request(run, task, attempt), eval_task)
            failure = graded.trajectory.failure
            if failure is None or failure.kind is not FailureKind.INFRASTRUCTURE:
                return graded
            if graded.trajectory.times.finished >= started:
                failures += 1
                if failures > self.plan.retries:
                    return graded
                await _BACKOFF.wait(failures)
            attempt += 1


STORE = "trajectories"
"""The default folder of the store, below that of the evaluation."""

_MOST_PROCESSES = 8


async def evaluate(
    plan: EvaluationPlan,
    eval_tasks: Sequence[EvalTask],
    *,
    storage: TrajectoryStorage,
    backend: InstanceBackend | None = None,
    grade: bool = True,
    retry_failed: bool = False,
    processes: int = 0,
    started: Callable[[Evaluation], Callable[[Outcome], None] | None] | None = None,
) -> None:
    """Run the unfinished attempts of a plan. ``started`` gets the evaluation and returns the callback for outcomes.

    ``processes``: worker processes for OpenHands' controllers; 0 runs them in this one.

    Raises ``ConfigError`` and ``StorageError``; an interruption keeps finished attempts.
    """
    if plan.suite.software and backend is None:
        raise ConfigError(f"{plan.suite.name} needs a back end for its instances")
    if backend is not None:
        await backend.check()
    evaluation = Evaluation(plan, eval_tasks, retry_failed=retry_failed)
    try:
        listener = started(evaluation) if started else None
        opening = open_eval_runner(plan, storage, backend, evaluation.scratch, processes, grade=grade)
        async with opening as runner:
            await evaluation.run(runner, listener)
    finally:
        evaluation.close()


@asynccontextmanager
async def open_eval_runner(
    plan: EvaluationPlan,
    storage: TrajectoryStorage,
    backend: InstanceBackend | None,
    scratch: Path,
    processes: int = 0,
    *,
    grade: bool = True,
) -> AsyncIterator[EvalRunner]:
    """The runner of a plan, with its own shop where that is the suite. ``scratch`` holds checkouts in use."""
    options, settings = options_of(plan, processes), plan.settings
    with ExitStack() as opened:
        if (own := own_suite(plan.suite.name)) is not None:
            settings = opened.enter_context(own.serving(settings))
        async with open_runner(settings, options, storage=storage, workers=processes) as host:
            yield EvalRunner(
                plan,
                host,
                strategy=options.strategy_spec(settings),
                storage=storage,
                scratch=scratch,
                backend=backend,
                reward=settings.reward,
                grade=grade,
            )


def options_of(plan: EvaluationPlan, processes: int) -> HostOptions:
    """The host options of a plan. Raises ``ConfigError`` for an agent that does not support the suite."""
    software = plan.suite.software
    if plan.agent != RL_AGENT and not software:
        raise ConfigError(f"{plan.suite.name} is an environment, which only {RL_AGENT} supports, not {plan.agent}")
    return HostOptions(
        environment_mode=not software,
        sessions=-(-plan.settings.max_workers // max(1, processes)),
        command_timeout=plan.command_timeout,
        native_tool_calling=plan.native_tool_calling,
        agent=plan.agent,
        token_ids=plan.agent == RL_AGENT if plan.token_ids is None else plan.token_ids,
        stuck_detection=software,
        llm_retries=plan.llm_retries,
        replies=REPLIES if software else (),
    )


def process_count(workers: int) -> int:
    """The number of worker processes for ``workers`` concurrent episodes: at most one for each CPU."""
    return max(1, min(workers, os.cpu_count() or 1, _MOST_PROCESSES))
