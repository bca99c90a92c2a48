"""What a run shows while it goes on and at its end: bars and lines in the terminal, facts and a report in files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, StorageError, boundary, describe
from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.statistics import paired_difference
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.training.data.dataset import CAUSES, causes_of
from openhands_rl_plugin.training.loop.loop import LoopListener
from openhands_rl_plugin.training.loop.plan import (
    EVALUATIONS,
    FACTS,
    LoopPlan,
    LoopState,
    RunFacts,
    SamplePair,
    StageChange,
    StageRecord,
    evaluations,
    success_of,
)


class ProgressListener(LoopListener):
    """Draws a bar with its times, and prints a line for each of ``stages``; a context manager around the run."""

    def __init__(self, stages: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self._progress = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=self.console)
        self._bar = self._progress.add_task("starting", total=None)
        self._stages, self._finished = stages, 0

    def __enter__(self) -> ProgressListener:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def noted(self, line: str) -> None:
        """Print it."""
        self.print(f"  {line}")

    def advanced(self, stage: str, activity: str, done: int, total: int) -> None:
        """Move the bar."""
        if not done:
            self._progress.reset(self._bar)
        what = f"{self._finished + 1}/{self._stages} {stage}: {activity}"
        self._progress.update(self._bar, description=what, completed=done, total=total)

    def stage_finished(self, record: StageRecord) -> None:
        """Print its line."""
        self._finished += 1
        self.print(stage_line(record))

    def print(self, line: str) -> None:
        """Print it above the bar."""
        self.console.print(visible(line), highlight=False, soft_wrap=True, markup=False)

    def ended(self, state: LoopState, changes: Sequence[StageChange], *last: str) -> None:
        """Print the evaluations, what changed, and the ``last`` lines."""
        self.console.print(final_table(state))
        for line in (*(change.sentence() for change in changes), *last):
            self.print(line)


def stage_line(record: StageRecord) -> str:
    """One stage in one line: its duration and its metrics."""
    metrics = record.metrics
    figures = [f"{name} {metrics[key]:.3f}" for key, name in _SHOWN.items() if key in metrics]
    figures += [f"{metrics[key]:.0f} {key}" for key in ("failed", "unscored") if metrics.get(key)]
    if metrics.get("episodes_used") == 0:
        causes = causes_of({name: int(metrics.get(f"episodes_{name}", 0.0)) for name in CAUSES})
        figures.append(f"nothing learnt: {', '.join(causes) or 'no episode ended'}")
    return (
        f"  {record.name:<20} {record.finished - record.started:6.0f} s  {record.adapter or 'base':<18} "
        + ", ".join(figures)
    )


_SHOWN = {"success": "success", "reward": "reward", "last_loss": "loss", "approx_kl": "KL"}


def final_table(state: LoopState) -> Table:
    """The evaluations as a table."""
    table = Table(title="Held-out tasks")
    for heading in ("stage", "success", "95% interval", "mean reward", "turns", "tasks"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for record in evaluations(state):
        success, metrics = success_of(record), record.metrics
        known = ["-", "-", "-"]
        if success is not None:
            known = [f"{success.mean:.3f}", f"{success.low:.3f} to {success.high:.3f}", f"{metrics['reward']:.3f}"]
        table.add_row(record.name, *known, f"{metrics['turns']:.1f}", str(success.n if success is not None else 0))
    return table


REPORT = "report.html"
"""The run's page, which the studio writes."""


def report_writer() -> Any | None:
    """The module that writes reports: the entry point ``studio`` of the group ``openhands_rl_plugin.reports``.

    ``None`` where no package has it, or where it cannot be loaded.
    """
    try:
        return registry.find("reports", "studio") if "studio" in registry.names("reports") else None
    except ConfigError:
        return None


class HeldOutEpisode(NamedTuple):
    """A valid episode of an evaluation."""

    id: str
    reward: float
    success: bool


@dataclass
class RunReport:
    """Writes a run's ``facts`` and its report into its ``directory``, after each stage.

    ``model``: the folder of the base model, whose tokenizer tokens are shown with. ``noted`` gets a line where a report
    cannot be written; the run goes on.
    """

    facts: RunFacts
    plan: LoopPlan
    directory: Path
    storage: TrajectoryStorage
    adapters: Path
    model: Path
    reward_version: str
    noted: Callable[[str], None]

    @property
    def path(self) -> Path:
        """The run's page, or its facts as JSON where nothing installed writes the page."""
        page = self.directory / REPORT
        return page if page.is_file() else self.directory / FACTS

    async def write(self, state: LoopState) -> None:
        """The facts and the report of what is finished."""
        try:
            with boundary(FailureKind.INFRASTRUCTURE, REPORT):
                changes, samples = await self._measured(state)
                self.facts = self.facts.model_copy(update={"changes": changes, "samples": samples})
                self.facts.save(self.directory)
                if (writer := report_writer()) is not None:
                    where = self.directory, self.storage, self.adapters
                    await writer.write_run_report(*where, tokenizer=str(self.model))
        except (CaughtFailure, StorageError) as error:
            self.noted(f"{self.directory / REPORT} was not written: {describe(error)}")

    async def _measured(self, state: LoopState) -> tuple[tuple[StageChange, ...], tuple[SamplePair, ...]]:
        """What each training stage changed, over the tasks with a valid episode before and after; and the tasks with
        the largest gain in reward between the first and the last evaluation, the largest first."""
        stages = [name for name in EVALUATIONS if state.record(name) is not None]
        names = {"evaluate-warm-start": "After SFT", "evaluate-final": "After RL"}
        against = {"evaluate-base": state.start or "the base model", "evaluate-warm-start": "SFT"}
        found = [(stage, await self._episodes(stage)) for stage in stages]
        changes: list[StageChange] = []
        for (before, first), (after, last) in itertools.pairwise(found):
            if both := sorted(first.keys() & last.keys()):
                rates = [[float(episodes[task].success) for task in both] for episodes in (first, last)]
                name = f"{names[after]} against {against[before]}"
                difference = paired_difference(*rates)
                changes.append(StageChange(name=name, before=before, after=after, difference=difference))
        first, last = (found[0][1], found[-1][1]) if found else ({}, {})
        most = sorted(first.keys() & last.keys(), key=lambda task: (first[task].reward - last[task].reward, task))
        gained = (SamplePair(task=task, before=first[task].id, after=last[task].id) for task in most[:_MOST_SAMPLES])
        return tuple(changes), tuple(gained)

    async def _episodes(self, stage: str) -> dict[str, HeldOutEpisode]:
        """The valid ones of an evaluation, by task."""
        where = TrajectoryFilter(run_id=f"{self.plan.run_id}/{stage}", failed=False)
        return {
            each.task.id: HeldOutEpisode(each.id, score.reward, self.plan.succeeded(each, score.reward))
            async for each, scores in self.storage.find(where)
            for score in scores
            if score.reward_version == self.reward_version and score.reward is not None
        }


_MOST_SAMPLES = 3
