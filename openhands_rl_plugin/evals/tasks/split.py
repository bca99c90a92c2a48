"""Training and held-out tasks of one repository, apart by file and by time.

Held-out tasks change files that no training task changes, and fixes that are held out are newer than all that are
trained on. A fix that keeps neither is dropped, and so is what a cut in time leaves on its wrong side. Where the files
are too few for that, injected bugs are split by function, and the split says so: both parts then read the same files.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen

TRAIN = "train"
"""The split of rows to train on, beside ``HELD_OUT``."""

LEAST_TRAINING, LEAST_HELD_OUT = 4, 4
"""Below these a run says nothing: it is refused."""

_ORDERS = 500
ACROSS, EARLIER, LATER, SPARE, NO_FUNCTION = (
    "changes files of both parts",
    "a held-out fix that is not newer than those of training",
    "a training fix that is not older than the held-out ones",
    "more than were asked for",
    "a past fix, where the split is by function",
)
"""Why a good task is in neither part."""


class SplitTask(Frozen):
    """``files``: those that its fix changes. ``time``: of a fix's commit, Unix seconds; ``None``: injected.

    ``function``: the qualified name of the one that an injected bug is in; empty: not known.
    """

    id: str
    files: frozenset[str]
    time: int | None = None
    function: str = ""


class TaskSplit(Frozen):
    """Ids, and why the others were dropped. ``by``: what no two tasks of different parts change."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]
    dropped: dict[str, str]
    by: Literal["file", "function"] = "file"

    @property
    def enough(self) -> bool:
        """Whether each part has as many as a run needs."""
        return len(self.training) >= LEAST_TRAINING and len(self.held_out) >= LEAST_HELD_OUT


def split_tasks(tasks: Sequence[SplitTask], training: int, held_out: int, *, seed: int) -> TaskSplit:
    """At most so many of each part, in the tasks' order; fewer tasks than both are shared out in the same proportion.

    The held-out files are the best of several hundred seeded choices, so that equal tasks give equal parts. By function
    where that gives too few. Raises ``ConfigError`` where a part would have fewer than ``LEAST_TRAINING`` or
    ``LEAST_HELD_OUT`` even so.
    """
    split = _best(tasks, training, held_out, seed)
    if split.enough:
        return split
    alone = [task for task in tasks if task.time is None and task.function]
    by_function = _best(_in_functions(alone), training, held_out, seed)
    if not by_function.enough:
        raise ConfigError(_too_few(tasks, split))
    fixes = {task.id: NO_FUNCTION for task in tasks if task not in alone}
    return by_function.model_copy(update={"dropped": {**by_function.dropped, **fixes}, "by": "function"})


def _best(tasks: Sequence[SplitTask], training: int, held_out: int, seed: int) -> TaskSplit:
    goal = min(held_out, max(LEAST_HELD_OUT, round(len(tasks) * held_out / (training + held_out))))
    best = max((_cut(tasks, files) for files in _choices(tasks, goal, seed)), key=lambda each: _worth(each, goal))
    return _limited(best, training, held_out)


def _in_functions(tasks: Sequence[SplitTask]) -> list[SplitTask]:
    """The same tasks with functions in the place of files. One that is defined in another belongs to that."""
    places = {(file, task.function) for task in tasks for file in task.files}

    def outermost(file: str, function: str) -> str:
        parts = function.split(".")
        names = (".".join(parts[:length]) for length in range(1, len(parts)))
        return f"{file}::{next((name for name in names if (file, name) in places), function)}"

    return [
        task.model_copy(update={"files": frozenset(outermost(file, task.function) for file in task.files)})
        for task in tasks
    ]


def _choices(tasks: Sequence[SplitTask], goal: int, seed: int) -> Iterator[frozenset[str]]:
    """Sets of files to hold out: those of a random order, until they have ``goal`` tasks."""
    count = Counter(file for task in tasks for file in task.files)
    files, order = sorted(count), random.Random(seed)
    for _ in range(_ORDERS):
        order.shuffle(files)
        chosen: list[str] = []
        while len(chosen) < len(files) and sum(count[file] for file in chosen) < goal:
            chosen.append(files[len(chosen)])
        yield frozenset(chosen)


def _cut(tasks: Sequence[SplitTask], files: frozenset[str]) -> TaskSplit:
    """The parts of one choice of files, with the cut in time that keeps most fixes."""
    held_out = [task for task in tasks if task.files <= files]
    training = [task for task in tasks if not task.files & files]
    times = sorted({task.time for task in tasks if task.time is not None})

    def kept(cut: int) -> int:
        new = sum(task.time is not None and task.time >= cut for task in held_out)
        return new + sum(task.time is not None and task.time < cut for task in training)

    cut = max([*times, *(time + 1 for time in times[-1:])], key=kept, default=0)
    early = {task.id for task in held_out if task.time is not None and task.time < cut}
    late = {task.id for task in training if task.time is not None and task.time >= cut}
    inside = {task.id for task in (*held_out, *training)}
    across = {task.id: ACROSS for task in tasks if task.id not in inside}
    return TaskSplit(
        training=tuple(task.id for task in training if task.id not in late),
        held_out=tuple(task.id for task in held_out if task.id not in early),
        dropped={**across, **dict.fromkeys(sorted(early), EARLIER), **dict.fromkeys(sorted(late), LATER)},
    )


def _worth(split: TaskSplit, goal: int) -> tuple[bool, int, int]:
    """Both parts large enough; near the goal; few tasks dropped."""
    return split.enough, -abs(len(split.held_out) - goal), len(split.training) + len(split.held_out)


def _limited(split: TaskSplit, training: int, held_out: int) -> TaskSplit:
    spare = (*split.training[training:], *split.held_out[held_out:])
    return TaskSplit(
        training=split.training[:training],
        held_out=split.held_out[:held_out],
        dropped={**split.dropped, **dict.fromkeys(spare, SPARE)},
    )


def _too_few(tasks: Sequence[SplitTask], split: TaskSplit) -> str:
    files = {file for task in tasks for file in task.files}
    reasons = Counter(split.dropped.values())
    why = "".join(f"; {count} dropped: {reason}" for reason, count in reasons.most_common())
    return (
        f"too few tasks: {len(split.training)} to train on and {len(split.held_out)} held out of {len(tasks)} good "
        f"ones, which change {len(files)} files; at least {LEAST_TRAINING} and {LEAST_HELD_OUT} are needed that share "
        f"no file, or at least no function: ask for more (--tasks, --held-out){why}"
    )
