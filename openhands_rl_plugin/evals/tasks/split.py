"""Training and held-out tasks of one repository, apart by file and by time.

Held-out tasks change files that no training task changes, and fixes that are held out are newer than all that are
trained on. A fix that keeps neither is dropped, and so is what a cut in time leaves on its wrong side. Where the files
are too few for that, injected bugs are split by function, and the split says so: both parts then read the same files.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from openhands_rl_plugin.core.errors import ConfigError

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


class SplitTask(NamedTuple):
    """``files``: those that its fix changes. ``time``: of a fix's commit, Unix seconds; ``None``: injected.

    ``function``: the qualified name of the one that an injected bug is in; empty: not known.
    """

    id: str
    files: frozenset[str]
    time: int | None = None
    function: str = ""


class TaskSplit(NamedTuple):
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
    if by_function.enough:
        fixes = {task.id: NO_FUNCTION for task in tasks if task not in alone}
        return by_function._replace(dropped={**by_function.dropped, **fixes}, by="function")
    files = {file for task in tasks for file in task.files}
    why = "".join(f"; {count} dropped: {reason}" for reason, count in Counter(split.dropped.values()).most_common())
    raise ConfigError(
        f"too few tasks: {len(split.training)} to train on and {len(split.held_out)} held out of {len(tasks)} good "
        f"ones, which change {len(files)} files; at least {LEAST_TRAINING} and {LEAST_HELD_OUT} are needed that share "
        f"no file, or at least no function: ask for more (--tasks, --held-out){why}"
    )


def _best(tasks: Sequence[SplitTask], training: int, held_out: int, seed: int) -> TaskSplit:
    """Of many random sets of files to hold out, the one that gives enough, is near the goal and drops few tasks."""
    goal = min(held_out, max(LEAST_HELD_OUT, round(len(tasks) * held_out / (training + held_out))))
    count = Counter(file for task in tasks for file in task.files)
    files, order = sorted(count), random.Random(seed)
    splits: list[TaskSplit] = []
    for _ in range(_ORDERS):
        order.shuffle(files)
        before = accumulate((count[file] for file in files), initial=0)
        splits.append(
            _cut(tasks, frozenset(file for file, so_far in zip(files, before, strict=False) if so_far < goal))
        )
    best = max(splits, key=lambda each: (each.enough, -abs(len(each.held_out) - goal), -len(each.dropped)))
    spare = dict.fromkeys((*best.training[training:], *best.held_out[held_out:]), SPARE)
    return TaskSplit(best.training[:training], best.held_out[:held_out], {**best.dropped, **spare})


def _in_functions(tasks: Sequence[SplitTask]) -> list[SplitTask]:
    """The same tasks with functions in the place of files. One that is defined in another belongs to that."""
    places = {(file, task.function) for task in tasks for file in task.files}

    def outermost(file: str, function: str) -> str:
        names = accumulate(function.split("."), "{}.{}".format)
        return f"{file}::{next(name for name in names if (file, name) in places)}"

    return [task._replace(files=frozenset(outermost(file, task.function) for file in task.files)) for task in tasks]


def _cut(tasks: Sequence[SplitTask], files: frozenset[str]) -> TaskSplit:
    """The parts of one choice of files, with the cut in time that keeps most fixes."""
    held_out = [task for task in tasks if task.files <= files]
    training = [task for task in tasks if not task.files & files]
    new, old = ([task.time for task in part if task.time is not None] for part in (held_out, training))
    times = sorted({*new, *old})
    cuts = [*times, *(time + 1 for time in times[-1:])]
    cut = max(cuts, key=lambda cut: sum(time >= cut for time in new) + sum(time < cut for time in old), default=0)
    early = {task.id: EARLIER for task in held_out if task.time is not None and task.time < cut}
    late = {task.id: LATER for task in training if task.time is not None and task.time >= cut}
    across = {task.id: ACROSS for task in tasks if task not in held_out and task not in training}
    return TaskSplit(
        training=tuple(task.id for task in training if task.id not in late),
        held_out=tuple(task.id for task in held_out if task.id not in early),
        dropped={**across, **early, **late},
    )
