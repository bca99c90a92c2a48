"""An evaluation: every task of every run is rolled out, graded and written to disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.core.retry import Backoff
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject
from openhands_rl_plugin.environments.workspace.copies import remove_tree
from openhands_rl_plugin.evals.runs.episodes import EvalRunner, EvalTask, GradedEpisode
from openhands_rl_plugin.evals.runs.outcome import Outcome, OutcomeKind, outcome_of
from openhands_rl_plugin.evals.runs.output_rows import completion_files, metadata_of, output_row, write_run_report
from openhands_rl_plugin.evals.runs.plan import AgentStrategy, EvaluationPlan, RunSpec, SessionAccess
from openhands_rl_plugin.evals.runs.resume import check_same_settings
from openhands_rl_plugin.evals.runs.run_files import RunFiles

SCRATCH = ".work"
"""The folder of checkouts below that of the evaluation; leftovers of a killed process are removed."""

_BACKOFF = Backoff(first=0.5, longest=10.0)

OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True)
class Work:
    """The tasks of one run that are not finished."""

    run: RunSpec
    files: RunFiles
    metadata: JsonObject
    eval_tasks: tuple[EvalTask, ...]


class Evaluation:
    """The runs of a plan over ``eval_tasks``; finished attempts are skipped. One process at a time; close it.

    ``by``: the agent's strategy, if it has one; ``access``: that of its commands. ``retry_failed`` repeats attempts
    that ended with an infrastructure failure. Raises ``ConfigError``, also for runs that were made with other settings.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        eval_tasks: Sequence[EvalTask],
        *,
        by: AgentStrategy | None = None,
        access: SessionAccess | None = None,
        retry_failed: bool = False,
    ) -> None:
        self.plan = plan
        self.eval_tasks = tuple(eval_tasks)
        self.work: tuple[Work, ...] = ()
        for run in plan.each_run():
            check_same_settings(plan, run, by, access)
        for run in plan.each_run():
            files = RunFiles(plan.run_directory(run))
            if retry_failed:
                files.forget(_failed_row)
            metadata = metadata_of(plan, run, time.time(), by, access)
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
            outcome = outcome_of(graded, work.run.index, self.plan.model)
            await asyncio.to_thread(self._write, work, eval_task, graded, outcome)
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
                work.files.directory, self.plan.model.name, [eval_task.task.id for eval_task in self.eval_tasks]
            )

    def close(self) -> None:
        """Release the locks of the runs, and remove remaining checkouts."""
        for work in self.work:
            work.files.close()
        remove_tree(self.scratch)

    async def _attempt(self, runner: EvalRunner, run: RunSpec, eval_task: EvalTask) -> GradedEpisode:
        """The first attempt without an infrastructure failure, or the last one, which says the first one's cause, too.

        Failed attempts of an earlier process are skipped and do not count as retries.
        """
        task = eval_task.task.model_copy(update={"limits": eval_task.task.limits or self.plan.limits()})
        started, attempt, failures = time.time(), 0, 0
        first = ""
        while True:
            graded = await runner.run(self.plan.request(run, task, attempt), eval_task)
            failure = graded.trajectory.failure
            if failure is None or failure.kind is not FailureKind.INFRASTRUCTURE:
                return graded
            first = first or failure.message
            if graded.trajectory.times.finished >= started:
                failures += 1
                if failures > self.plan.retries:
                    return _with_first_cause(graded, failure, first)
                await _BACKOFF.wait(failures)
            attempt += 1

    def _write(self, work: Work, eval_task: EvalTask, graded: GradedEpisode, outcome: Outcome) -> None:
        if self.plan.completions:
            work.files.write_completions(eval_task.task.id, completion_files(graded.trajectory))
        work.files.append(output_row(graded, eval_task, outcome, work.metadata))


def _with_first_cause(graded: GradedEpisode, last: Failure, first: str) -> GradedEpisode:
    """The stored episode has its own failure; its line says what it began with as well."""
    if first == last.message:
        return graded
    failure = last.model_copy(update={"message": f"{last.message} (at the first attempt: {first})"})
    return graded._replace(trajectory=graded.trajectory.model_copy(update={"failure": failure}))


def _failed_row(row: JsonObject) -> bool:
    result = row.get("test_result")
    outcome = result.get("outcome") if isinstance(result, dict) else None
    return isinstance(outcome, dict) and outcome.get("kind") == OutcomeKind.INFRASTRUCTURE.value
