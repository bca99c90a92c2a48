"""The progress bar of commands and of ``RLAgent``: on stderr, and only where that is a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from openhands_rl_plugin.core.messages import visible


class ProgressBar:
    """One bar with its times."""

    def __init__(self, progress: Progress, what: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=total, note="")

    @property
    def drawn(self) -> bool:
        """Whether stderr is a terminal."""
        return not self._progress.disable

    def update(self, done: int, total: int | None = None, *, what: str | None = None, note: str | None = None) -> None:
        """Move the bar to ``done``. ``what`` is the text before it, ``note`` the one after it (default: the speed)."""
        speed = self._progress.tasks[0].speed or 0
        note = f"{speed:,.0f}/s" if note is None and speed >= 1 else note
        self._progress.update(self._task, completed=done, total=total, description=what, note=note or "")

    def advance(self) -> None:
        """Move the bar by one."""
        self.update(int(self._progress.tasks[0].completed) + 1)

    def print(self, line: str) -> None:
        """Print a line above the bar, on a terminal or not."""
        self._progress.console.print(visible(line), highlight=False, soft_wrap=True, markup=False)


@contextmanager
def progress_bar(
    what: str, total: int | None = None, *, in_bytes: bool = False, shown: bool = True
) -> Iterator[ProgressBar]:
    """A bar until the block ends. ``total``: steps, or bytes with ``in_bytes``; ``None`` when not known yet."""
    amount = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    note = () if in_bytes else (TextColumn("{task.fields[note]}"),)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *amount,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *note,
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        yield ProgressBar(progress, what, total)
