"""The times beside a progress bar, with a clock in the test's hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from openhands_rl_plugin.trajectories.view.progress import TimesColumn, duration


class Bar:
    """A bar whose clock is ``now``; ``said`` is what it shows after ``done`` of 100 steps."""

    def __init__(self, **fields: object) -> None:
        self.now = 0.0
        self._column = TimesColumn()
        self._progress = Progress(self._column, console=Console(file=io.StringIO()), get_time=lambda: self.now)
        self._task = self._progress.add_task("x", total=100, **fields)

    def said(self, now: float, done: float) -> str:
        self.now = now
        self._progress.update(self._task, completed=done)
        return self._column.render(self._progress.tasks[0]).plain

    def reset(self) -> None:
        self._progress.reset(self._task)


def test_nothing_is_promised_before_there_is_a_measure() -> None:
    bar = Bar()
    assert bar.said(50, 0) == "0:50 elapsed"
    assert bar.said(100, 1) == "1:40 elapsed"
    assert bar.said(101, 2) == "1:41 elapsed", "two that ended at once are no measure"
    assert bar.said(200, 2) == "3:20 elapsed, about 2:43:20 left"


def test_a_resumed_run_does_not_promise_by_what_was_done_before() -> None:
    bar = Bar()
    assert bar.said(1, 40) == "0:01 elapsed"
    assert bar.said(61, 41) == "1:01 elapsed, about 59:00 left"


def test_a_slow_first_step_counts_until_others_outweigh_it() -> None:
    bar = Bar()
    bar.said(100, 1)
    assert bar.said(110, 11) == "1:50 elapsed, about 14:50 left"


def test_a_finished_bar_and_one_that_never_promises() -> None:
    bar = Bar()
    bar.said(1, 1)
    assert bar.said(100, 100) == "1:40 elapsed"
    bar = Bar(promise=False)
    bar.said(1, 1)
    assert bar.said(50, 50) == "0:50 elapsed"


def test_a_bar_that_begins_again_measures_again() -> None:
    bar = Bar()
    bar.said(10, 10)
    bar.said(20, 20)
    bar.reset()
    assert bar.said(30, 0).endswith("elapsed") and bar.said(35, 5).endswith("elapsed")


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (61.4, "1:01"), (3599.6, "1:00:00"), (7325, "2:02:05")])
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
