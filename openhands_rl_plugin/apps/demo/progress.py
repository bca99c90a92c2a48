"""Progress of a running loop: a bar for the run, a bar for the current activity, and a line per stage."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from openhands_rl_plugin.apps.demo.summary import COLUMNS, evaluation_rows
from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord
from openhands_rl_plugin.training.loop.sync import LoopListener
from openhands_rl_plugin.trajectories.view.progress import TimesColumn


class ProgressListener(LoopListener):
    """Draws bars with their times; use as a context manager around the run."""

    def __init__(self, stages: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimesColumn(),
            console=self.console,
        )
        self._run = self._progress.add_task("stages", total=stages, promise=False)  # they are of different lengths
        self._activity = self._progress.add_task("starting", total=None)
        self._shown = ""

    def __enter__(self) -> ProgressListener:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage_started(self, name: str) -> None:
        """Show the name of the stage."""
        self._show(f"{name}: starting", 0, None)

    def advanced(self, stage: str, activity: str, done: int, total: int) -> None:
        """Move the lower bar."""
        self._show(f"{stage}: {activity}", done, total)

    def stage_finished(self, record: StageRecord) -> None:
        """Move the upper bar and print a line."""
        self._progress.advance(self._run)
        self.console.print(stage_line(record), highlight=False, soft_wrap=True)

    def _show(self, description: str, done: int, total: int | None) -> None:
        if description != self._shown:
            self._progress.reset(self._activity, total=total, description=description)
            self._shown = description
        self._progress.update(self._activity, completed=done)


def stage_line(record: StageRecord) -> str:
    """One stage in one line: its duration and its metrics."""
    metrics = record.metrics
    figures = [f"{name} {metrics[key]:.3f}" for key, name in _SHOWN.items() if key in metrics]
    if metrics.get("failed"):
        figures.append(f"{metrics['failed']:.0f} failed")
    if metrics.get("unscored"):
        figures.append(f"{metrics['unscored']:.0f} without a reward")
    return (
        f"  {record.name:<20} {record.finished - record.started:6.0f} s  {record.adapter or 'base':<18} "
        + ", ".join(figures)
    )


_SHOWN = {"success": "success", "reward": "reward", "last_loss": "loss", "approx_kl": "KL"}


def final_table(state: LoopState, tasks: str = "goals") -> Table:
    """The evaluations as a table; ``tasks``: the word for tasks."""
    table = Table(title=f"Held-out {tasks}")
    for heading in (*COLUMNS, tasks):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for row in evaluation_rows(state):
        table.add_row(*row)
    return table
