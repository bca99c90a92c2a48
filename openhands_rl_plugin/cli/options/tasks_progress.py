"""What ``openhands-rl tasks`` shows while it works: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class MakingBar:
    """Packages done, and what became of the last bug."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._plain = not progress.console.is_terminal
        self._task = progress.add_task("making", total=None, last="")
        self._label = ""

    def package(self, label: str, at: int, of: int) -> None:
        """A package begins."""
        self._label = label
        self._progress.update(self._task, description=label, completed=at, total=of, last="")
        if self._plain:
            self._progress.console.print(f"[{at + 1}/{of}] {label}", highlight=False, markup=False)

    def tried(self, made: int, wanted: int, reason: str) -> None:
        """A bug was tried."""
        last = f"{made} of {wanted} tasks; " + (reason or "made one")
        self._progress.update(self._task, last=last)
        if self._plain:
            self._progress.console.print(f"  {last}", highlight=False, markup=False)


@contextmanager
def making() -> Iterator[MakingBar]:
    """The bar of ``tasks make``, on stderr."""
    with _bar() as progress:
        yield MakingBar(progress)


@contextmanager
def checking() -> Iterator[Callable[[int, int, str], None]]:
    """The bar of ``tasks check``: call it with tasks done, their number, and the id of the last one."""
    with _bar() as progress:
        task = progress.add_task("checking", total=None, last="")

        def heard(done: int, total: int, last: str) -> None:
            progress.update(task, completed=done, total=total, last=last)

        yield heard


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    shown = TextColumn("{task.fields[last]}")
    return Progress(*columns, shown, console=console, transient=True, disable=not console.is_terminal)
