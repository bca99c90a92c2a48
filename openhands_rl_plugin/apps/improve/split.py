"""Training and held-out tasks of one repository, apart by file and by time.

Held-out tasks change files that no training task changes, and fixes that are held out are newer than all that are
trained on. A fix that keeps neither is dropped, and so is what a cut in time leaves on its wrong side.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen

LEAST_TRAINING, LEAST_HELD_OUT = 4, 4
"""Below these a run says nothing: it is refused."""

_ORDERS = 500
ACROSS, EARLIER, LATER, SPARE = (
    "changes files of both parts",
    "a held-out fix that is not newer than those of training",
    "a training fix that is not older than the held-out ones",
    "more than were asked for",
)
"""Why a good task is in neither part."""


class SplitTask(Frozen):
    """``files``: those that its fix changes. ``time``: of a fix's commit, Unix seconds; ``None``: injected."""

    id: str
    files: frozenset[str]
    time: int | None = None


class TaskSplit(Frozen):
    """Ids, and why the others were dropped."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]
    dropped: dict[str, str]


def split_tasks(tasks: Sequence[SplitTask], training: int, held_out: int, *, seed: int) -> TaskSplit:
    """At most so many of each part, in the tasks' order; fewer tasks than both are shared out in the same proportion.

    The held-out files are the best of several hundred seeded choices, so that equal tasks give equal parts. Raises
    ``ConfigError`` where a part would have fewer than ``LEAST_TRAINING`` or ``LEAST_HELD_OUT``.
    """
    goal = min(held_out, max(LEAST_HELD_OUT, round(len(tasks) * held_out / (training + held_out))))
    best = max((_cut(tasks, files) for files in _choices(tasks, goal, seed)), key=lambda each: _worth(each, goal))
    split = _limited(best, training, held_out)
    if len(split.training) < LEAST_TRAINING or len(split.held_out) < LEAST_HELD_OUT:
        raise ConfigError(_too_few(tasks, split))
    return split


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
    enough = len(split.training) >= LEAST_TRAINING and len(split.held_out) >= LEAST_HELD_OUT
    return enough, -abs(len(split.held_out) - goal), len(split.training) + len(split.held_out)


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
        f"no file: ask for more (--tasks, --held-out, with --fresh){why}"
    )
