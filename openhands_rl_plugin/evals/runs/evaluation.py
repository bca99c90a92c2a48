"""An evaluation: every task in every run, played, judged and written down, until nothing is left to do."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.core.retry import Backoff
from openhands_rl_plugin.core.types import FailureKind, JsonObject
from openhands_rl_plugin.evals.runs.judged import Entry, Judged, Player
from openhands_rl_plugin.evals.runs.outcome import Outcome, OutcomeKind, outcome_of
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, PlayedBy, Run
from openhands_rl_plugin.evals.runs.rows import completion_files, metadata_of, output_row
from openhands_rl_plugin.evals.runs.run_files import RunFiles
from openhands_rl_plugin.evals.runs.run_report import write_run_report
from openhands_rl_plugin.evals.runs.same_run import check_same_run

SCRATCH = ".work"
"""Where checkouts lie, below the folder of an evaluation; what a killed process left there is removed."""

_BACKOFF = Backoff(first=0.5, longest=10.0)

OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True)
class Work:
    """What one run has still to do."""

    run: Run
    files: RunFiles
    metadata: JsonObject
    entries: tuple[Entry, ...]


class Evaluation:
    """The runs of a plan over ``entries``, resumed where an earlier process left them. One process at a time.

    ``by``: the strategy that plays it, where the agent has one. ``retry_failed`` plays again what failed for want of
    infrastructure. Close it. Raises ``ConfigError``, also for runs that were played otherwise.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        entries: Sequence[Entry],
        *,
        by: PlayedBy | None = None,
        retry_failed: bool = False,
    ) -> None:
        self.plan = plan
        self.entries = tuple(entries)
        self.work: tuple[Work, ...] = ()
        for run in plan.each_run():
            check_same_run(plan, run, by)
        for run in plan.each_run():
            files = RunFiles(plan.run_directory(run))
            if retry_failed:
                files.forget(_failed_row)
            metadata = metadata_of(plan, run, time.time(), by)
            left = tuple(entry for entry in entries if entry.task.id not in files.done)
            self.work += (Work(run, files, metadata, left),)
        shutil.rmtree(self.scratch, ignore_errors=True)

    @property
    def scratch(self) -> Path:
        """Where the player may put what it needs while it plays."""
        return self.plan.out / SCRATCH

    @property
    def left(self) -> int:
        """Attempts that are not done yet."""
        return sum(len(work.entries) for work in self.work)

    async def run(self, player: Player, on_outcome: OnOutcome | None = None) -> None:
        """Do what is left, then write predictions and the run reports. Every attempt is on disk when it is told of.

        An interrupted evaluation keeps what was finished. Raises ``ConfigError`` and ``StorageError``.
        """
        for work in self.work:
            work.files.write_metadata(work.metadata)

        async def attempt(work: Work, entry: Entry) -> None:
            judged = await self._play(player, work.run, entry)
            outcome = outcome_of(judged, work.run.index, self.plan.model)
            await asyncio.to_thread(self._write, work, entry, judged, outcome)
            if on_outcome is not None:
                on_outcome(outcome)

        try:
            async with asyncio.TaskGroup() as group:
                for work in self.work:
                    for entry in work.entries:
                        group.create_task(attempt(work, entry))
        except ExceptionGroup as errors:
            # What stops an evaluation (a full disk, say) stops every attempt in the same way: one tells it all.
            raise errors.exceptions[0] from errors
        for work in self.work:
            write_run_report(work.files.directory, self.plan.model.name, [entry.task.id for entry in self.entries])

    def close(self) -> None:
        """Let others at the runs, and remove what is left of the checkouts."""
        for work in self.work:
            work.files.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    async def _play(self, player: Player, run: Run, entry: Entry) -> Judged:
        """The first attempt that did not fail for want of infrastructure, or the last one.

        Failed attempts of an earlier process are passed over, and do not count.
        """
        task = entry.task.model_copy(update={"limits": entry.task.limits or self.plan.limits()})
        started, attempt, failures = time.time(), 0, 0
        while True:
            judged = await player.play(self.plan.request(run, task, attempt), entry)
            failure = judged.trajectory.failure
            if failure is None or failure.kind is not FailureKind.INFRASTRUCTURE:
                return judged
            if judged.trajectory.times.finished >= started:
                failures += 1
                if failures > self.plan.retries:
                    return judged
                await _BACKOFF.wait(failures)
            attempt += 1

    def _write(self, work: Work, entry: Entry, judged: Judged, outcome: Outcome) -> None:
        if self.plan.completions:
            work.files.write_completions(entry.task.id, completion_files(judged.trajectory))
        work.files.append(output_row(judged, entry, outcome, work.metadata))


def _failed_row(row: JsonObject) -> bool:
    result = row.get("test_result")
    outcome = result.get("outcome") if isinstance(result, dict) else None
    return isinstance(outcome, dict) and outcome.get("kind") == OutcomeKind.INFRASTRUCTURE.value
