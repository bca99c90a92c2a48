"""Text and progress bars on a terminal. What a model or a tool wrote is shown, never obeyed: control sequences become
visible. Bars are on stderr, and only where that is a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from openhands_rl_plugin.core.messages import visible

_WIDTH_OF_FILES = 200


def console() -> Console:
    """Where commands print: colours only on a terminal, and lines as long as they are where it is none."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    return Console(highlight=False, markup=False, emoji=False, width=width)


def print_json(value: Any) -> None:
    """Print values as JSON of ASCII characters, which no terminal acts upon."""
    print(json.dumps(to_jsonable_python(value, inf_nan_mode="strings"), indent=1))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> Table:
    """A plain table; the columns in ``numbers`` are aligned to the right. Cells are taken literally."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(Text(column), justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(visible(cell)) for cell in row))
    return made


def number(value: float | None) -> str:
    """Three significant places; ``-`` for what is not known, which is not zero."""
    return "-" if value is None else f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"


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
        """Move the bar to ``done``. ``what`` is the text before it, ``note`` the one after it."""
        self._progress.update(self._task, completed=done, total=total, description=what, note=note or "")

    def advance(self) -> None:
        """Move the bar by one."""
        self.update(int(self._progress.tasks[0].completed) + 1)

    def print(self, line: str) -> None:
        """Print a line above the bar, on a terminal or not."""
        self._progress.console.print(visible(line), highlight=False, soft_wrap=True, markup=False)


@contextmanager
def progress_bar(what: str, total: int | None = None, *, shown: bool = True) -> Iterator[ProgressBar]:
    """A bar until the block ends. ``total``: steps; ``None`` when not known yet."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        yield ProgressBar(progress, what, total)
