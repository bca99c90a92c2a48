"""Training and held-out tasks of one repository, apart by file and by time.

Held-out tasks change files that no training task changes, and fixes that are held out are newer than all that are
trained on; a task that keeps neither is left out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from openhands_rl_plugin.core.errors import ConfigError

LEAST_TRAINING, LEAST_HELD_OUT = 4, 4
"""Below these a run says nothing: it is refused."""
_ORDERS = 500


class SplitTask(NamedTuple):
    """``files``: those that its fix changes. ``time``: of a fix's commit, ISO 8601 in UTC; empty: injected."""

    id: str
    files: frozenset[str]
    time: str = ""


class TaskSplit(NamedTuple):
    """The ids of both parts."""

    training: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()

    @property
    def enough(self) -> bool:
        """Whether each part has as many as a run needs."""
        return len(self.training) >= LEAST_TRAINING and len(self.held_out) >= LEAST_HELD_OUT


def split_tasks(tasks: Sequence[SplitTask], training: int, held_out: int, *, seed: int) -> TaskSplit:
    """At most so many of each part, in the tasks' order; fewer tasks than both are shared out in the same proportion.

    Of many random sets of files to hold out, it takes the one that gives enough, is near the goal and leaves few out.
    Raises ``ConfigError`` where a part has fewer than ``LEAST_TRAINING`` or ``LEAST_HELD_OUT`` even so.
    """
    goal = min(held_out, max(LEAST_HELD_OUT, round(len(tasks) * held_out / (training + held_out))))
    count = Counter(file for task in tasks for file in task.files)
    files, order = sorted(count), random.Random(seed)
    splits = [TaskSplit()]
    for _ in range(_ORDERS if tasks else 0):
        order.shuffle(files)
        before = accumulate((count[file] for file in files), initial=0)
        splits.append(_cut(tasks, {file for file, so_far in zip(files, before, strict=False) if so_far < goal}))
    best = max(splits, key=lambda each: (each.enough, -abs(len(each.held_out) - goal), len(each.training)))
    if not best.enough:
        raise ConfigError(
            f"too few tasks: {len(best.training)} to train on and {len(best.held_out)} held out of {len(tasks)} good "
            f"ones, which change {len(files)} files; at least {LEAST_TRAINING} and {LEAST_HELD_OUT} are needed that "
            "share no file: ask for more (--tasks, --held-out)"
        )
    return TaskSplit(best.training[:training], best.held_out[:held_out])


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
