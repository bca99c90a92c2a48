"""Training and held-out tasks share no file, and held-out fixes are the newer ones."""

from __future__ import annotations

import random

import pytest

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.tasks.make import LEAST_HELD_OUT, LEAST_TRAINING, SplitTask, split_tasks


def injected(count: int, files: int, seed: int = 0) -> list[SplitTask]:
    order = random.Random(seed)
    return [SplitTask(id=f"bug-{at}", files=frozenset({f"m{order.randrange(files)}.py"})) for at in range(count)]


def fix(at: int, *files: str) -> SplitTask:
    return SplitTask(id=f"fix-{at}", files=frozenset(files), time=f"2024-01-{at + 1:02}T00:00:00+00:00")


@pytest.mark.parametrize("seed", range(4))
def test_parts_share_no_file_and_the_held_out_fixes_are_newer(seed: int) -> None:
    order = random.Random(seed)
    fixes = [fix(at, *(f"m{order.randrange(9)}.py" for _ in range(order.choice([1, 1, 2])))) for at in range(12)]
    tasks = [*fixes, *injected(30, 9, seed)]
    split = split_tasks(tasks, 24, 10, seed=1)
    known = {task.id: task for task in tasks}
    training, held_out = ([known[name] for name in part] for part in (split.training, split.held_out))
    assert not {file for task in training for file in task.files} & {file for task in held_out for file in task.files}
    times = [[task.time for task in part if task.time] for part in (training, held_out)]
    assert not (times[0] and times[1]) or max(times[0]) < min(times[1])
    assert len(split.training) >= LEAST_TRAINING and len(split.held_out) >= LEAST_HELD_OUT
    assert split == split_tasks(tasks, 24, 10, seed=1)


@pytest.mark.parametrize(("count", "files"), [(7, 7), (40, 1)])
def test_too_few_are_counted_in_one_line(count: int, files: int) -> None:
    with pytest.raises(ConfigError, match=f"of {count} good ones.*at least 4 and 4 are needed") as refused:
        split_tasks(injected(count, files), 32, 16, seed=1)
    assert "\n" not in str(refused.value)
