"""Training and held-out tasks of one repository, apart by file and by time.

Held-out tasks change files that no training task changes, and fixes that are held out are newer than all that are
trained on; a task that keeps neither is left out. Where the files are too few for that, injected bugs are split by
function, and the split says so: both parts then read the same files.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from openhands_rl_plugin.core.errors import ConfigError

LEAST_TRAINING, LEAST_HELD_OUT = 4, 4
"""Below these a run says nothing: it is refused."""
_ORDERS = 500


class SplitTask(NamedTuple):
    """``files``: those that its fix changes. ``time``: of a fix's commit, ISO 8601 in UTC; empty: injected.

    ``function``: the qualified name of the one that an injected bug is in; empty: not known.
    """

    id: str
    files: frozenset[str]
    time: str = ""
    function: str = ""


class TaskSplit(NamedTuple):
    """Ids. ``by``: what no two tasks of different parts change."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]
    by: Literal["file", "function"] = "file"

    @property
    def enough(self) -> bool:
        """Whether each part has as many as a run needs."""
        return len(self.training) >= LEAST_TRAINING and len(self.held_out) >= LEAST_HELD_OUT


def split_tasks(tasks: Sequence[SplitTask], training: int, held_out: int, *, seed: int) -> TaskSplit:
    """At most so many of each part, in the tasks' order; fewer tasks than both are shared out in the same proportion.

    By function where the files give too few. Raises ``ConfigError`` where a part would have fewer than
    ``LEAST_TRAINING`` or ``LEAST_HELD_OUT`` even so.
    """
    split = _best(tasks, training, held_out, seed)
    if split.enough:
        return split
    by_function = _best(_in_functions(tasks), training, held_out, seed)._replace(by="function")
    if by_function.enough:
        return by_function
    files = {file for task in tasks for file in task.files}
    raise ConfigError(
        f"too few tasks: {len(split.training)} to train on and {len(split.held_out)} held out of {len(tasks)} good "
        f"ones, which change {len(files)} files; at least {LEAST_TRAINING} and {LEAST_HELD_OUT} are needed that share "
        "no file, or at least no function: ask for more (--tasks, --held-out)"
    )


def _best(tasks: Sequence[SplitTask], training: int, held_out: int, seed: int) -> TaskSplit:
    """Of many random sets of files to hold out, the one that gives enough, is near the goal and leaves few out."""
    goal = min(held_out, max(LEAST_HELD_OUT, round(len(tasks) * held_out / (training + held_out))))
    count = Counter(file for task in tasks for file in task.files)
    files, order = sorted(count), random.Random(seed)
    splits = [TaskSplit((), ())]
    for _ in range(_ORDERS if tasks else 0):
        order.shuffle(files)
        before = accumulate((count[file] for file in files), initial=0)
        splits.append(_cut(tasks, {file for file, so_far in zip(files, before, strict=False) if so_far < goal}))
    parts = max(splits, key=lambda each: (each.enough, -abs(len(each.held_out) - goal), len(each.training)))
    return TaskSplit(parts.training[:training], parts.held_out[:held_out])


def _in_functions(tasks: Sequence[SplitTask]) -> list[SplitTask]:
    """Injected bugs with functions in the place of files. One that is defined in another belongs to that."""
    injected = [task for task in tasks if not task.time and task.function]
    places = {(file, task.function) for task in injected for file in task.files}

    def outermost(file: str, function: str) -> str:
        names = accumulate(function.split("."), "{}.{}".format)
        return f"{file}::{next(name for name in names if (file, name) in places)}"

    return [task._replace(files=frozenset(outermost(file, task.function) for file in task.files)) for task in injected]


def _cut(tasks: Sequence[SplitTask], files: set[str]) -> TaskSplit:
    """The parts of one choice of files, with the cut in time that keeps most fixes."""
    held_out = [task for task in tasks if task.files <= files]
    training = [task for task in tasks if not task.files & files]
    new, old = ([task.time for task in part if task.time] for part in (held_out, training))
    cuts = sorted({*new, *old, "9"})
    cut = max(cuts, key=lambda cut: sum(time >= cut for time in new) + sum(time < cut for time in old))
    return TaskSplit(
        training=tuple(task.id for task in training if task.time < cut),
        held_out=tuple(task.id for task in held_out if not task.time or task.time >= cut),
    )
