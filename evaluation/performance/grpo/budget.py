"""A budget of CPU time for training, and what was published within it: for both sides of ``grpo``."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from evaluation.performance.grpo.turns import Kind
from evaluation.performance.loops.demo import process_tree
from openhands_rl_plugin.core.types import Frozen

_TICKS = os.sysconf("SC_CLK_TCK")
_EVERY = 1.0


class Job(Frozen):
    """What one process of a side does; ``adapter`` is the one that SFT left in ``run``, or the one to measure."""

    run: Path
    model: Path
    out: Path
    adapter: Path
    seed: int
    held_out: int
    minutes: float
    tasks: int
    samples: int
    step_episodes: int
    threads: int
    generation: Kind = "cached"
    trl_learning_rate: float | None = None


class Mark(Frozen):
    """An adapter that was ready after ``cpu_seconds`` of processor time and ``wall_seconds`` since the beginning."""

    step: int
    adapter: Path
    cpu_seconds: float
    wall_seconds: float
    figures: dict[str, float]


def tree_cpu_seconds(root: int) -> float:
    """User and system time of a process, its descendants, and those of their children that have ended."""
    return sum(_cpu_seconds(pid) for pid in process_tree(root))


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS  # utime, stime, cutime, cstime


class CpuBudget:
    """Counts the processor time of this process and its descendants from ``begin``.

    Only marks made before the budget is spent count. ``read`` returns the tree's processor time in seconds.
    """

    def __init__(self, seconds: float, marks: Path, read: Callable[[], float] | None = None) -> None:
        self._seconds = seconds
        self._marks = marks
        self._read = read or (lambda: tree_cpu_seconds(os.getpid()))
        self._lock = threading.Lock()
        self._started: tuple[float, float] | None = None

    def begin(self) -> None:
        """Start to count; a second call does nothing."""
        if self._started is None:
            self._started = (self._read(), time.monotonic())

    @property
    def spent(self) -> float:
        """Seconds since ``begin``; none before it."""
        return self._read() - self._started[0] if self._started is not None else 0.0

    def mark(self, step: int, adapter: Path, figures: dict[str, float]) -> bool:
        """Note an adapter that is whole on the disk; returns whether that was within the budget."""
        assert self._started is not None
        with self._lock:
            spent = self.spent
            if spent > self._seconds:
                return False
            wall = time.monotonic() - self._started[1]
            mark = Mark(step=step, adapter=adapter, cpu_seconds=spent, wall_seconds=wall, figures=figures)
            with open(self._marks, "a", encoding="utf-8") as file:
                file.write(mark.model_dump_json() + "\n")
        return True

    def end_process_when_spent(self) -> None:
        """Watch from now on. Nothing is cleaned up at the end; children that hold a pipe to this process see it."""
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.spent <= self._seconds:
            time.sleep(_EVERY)
        with self._lock:  # a mark that is being written is written whole
            os._exit(0)


def read_marks(path: Path) -> tuple[Mark, ...]:
    """All marks, in order; none where nothing was published."""
    if not path.exists():
        return ()
    return tuple(Mark.model_validate_json(line) for line in path.read_text().splitlines())
