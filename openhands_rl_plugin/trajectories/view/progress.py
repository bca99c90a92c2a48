"""The times beside every progress bar: what has passed, and what is left as soon as that can be measured."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task, TaskID
from rich.text import Text

_SHORTEST_MEASURE_S = 2.0


class TimesColumn(ProgressColumn):
    """``1:23 elapsed, about 4:10 left``.

    Nothing is promised before a step ended that was seen to begin. Two speeds are measured, since the beginning and
    since the first step ended, and the slower one counts: the first step may be slow, the first of a resumed run (40
    of 100 at once) and of many side by side seem fast. A task with the field ``promise=False`` never says what is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[TaskID, tuple[float, float]] = {}

    def render(self, task: Task) -> Text:
        """The times of a bar."""
        elapsed = task.finished_time if task.finished else task.elapsed
        said = f"{duration(elapsed or 0.0)} elapsed"
        if (left := self.left(task)) is not None:
            said += f", about {duration(left)} left"
        return Text(said, style="progress.elapsed")

    def left(self, task: Task) -> float | None:
        """The seconds that are left; ``None`` while unknown, and for a finished task."""
        done, elapsed = task.completed, task.elapsed or 0.0
        first = self._first.get(task.id)
        if first is not None and (done < first[0] or elapsed < first[1]):
            first = None  # the bar began again
            del self._first[task.id]
        if first is None:
            if done > 0:
                self._first[task.id] = (done, elapsed)
            return None
        passed = elapsed - first[1]
        if task.total is None or done <= first[0] or passed < _SHORTEST_MEASURE_S or task.finished:
            return None
        if not task.fields.get("promise", True):
            return None
        return (task.total - done) / min(done / elapsed, (done - first[0]) / passed)


def duration(seconds: float) -> str:
    """``4:05``, or ``1:04:05`` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
