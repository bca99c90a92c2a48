"""What ``export`` and ``import`` share: the formats' help, and the bar."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def add_format(parser: argparse.ArgumentParser) -> None:
    """``--format``."""
    parser.add_argument("--format", required=True, metavar="F", help="one of those below")


def formats_epilog(examples: str) -> str:
    """The examples, and the table of formats."""
    from openhands_rl_plugin.trajectories.exchange.formats import table

    return f"formats:\n{table()}\n\n{examples}"


@contextmanager
def bar(what: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar with rate and time left on stderr, where that is a terminal; call what it gives with the amount done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counted = (MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    amount = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else counted
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total, rate="")

        def advanced(done: int) -> None:
            speed = progress.tasks[0].speed
            progress.update(task, completed=done, rate=f"{speed:,.0f}/s" if speed else "")

        yield advanced
