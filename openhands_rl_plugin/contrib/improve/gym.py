"""The gym of a repository: tasks that went through the gate, their split, and what a run earned."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections import Counter
from pathlib import Path

from pydantic import Field, ValidationError

from openhands_rl_plugin.apps.loop.checks import claim
from openhands_rl_plugin.apps.loop.run import LoopResult
from openhands_rl_plugin.cli.terminal import ENDING
from openhands_rl_plugin.core.errors import StorageError, describe
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.records import HELD_OUT
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.runs.suites import make_backend
from openhands_rl_plugin.evals.swe.instances import read_instances
from openhands_rl_plugin.evals.swe.patches import touched_files
from openhands_rl_plugin.evals.swe.recipes import PYTHON
from openhands_rl_plugin.evals.tasks.make import (
    LEAST_HELD_OUT,
    LEAST_TRAINING,
    SplitTask,
    TaskPlan,
    check_tasks,
    make_tasks,
    split_tasks,
    write_tasks,
)
from openhands_rl_plugin.evals.tasks.source import Source
from openhands_rl_plugin.trajectories.view import ProgressBar

_SOURCE, _MADE, _GYM = "source.json", "made.jsonl", "gym.json"
_SPARE = 1.25
"""Tasks made for each that is wanted: the gate and the split drop some."""


class WantedTasks(Frozen):
    """How many tasks to make, and how; ``tests`` to ``timeout`` are as in ``TaskPlan``."""

    tasks: int = Field(ge=LEAST_TRAINING, le=500)
    held_out: int = Field(ge=LEAST_HELD_OUT, le=500)
    seed: int = 1
    python: str = Field(default=PYTHON, pattern=r"^3\.1\d$")
    tests: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    timeout: float = Field(default=60.0, gt=0)


class Gym(Frozen, extra="ignore"):
    """The tasks of a repository. ``rows``: the name of their file. Of both parts, to train on and held out: ``counts``,
    how many are ``fixes`` of the history, how many ``files`` they change. ``dropped``: reason -> how many tasks.
    ``grading``: mean seconds in which one patch is graded. ``longest``: the longest text of a problem.
    """

    rows: str
    counts: tuple[int, int]
    fixes: tuple[int, int]
    files: tuple[int, int]
    dropped: dict[str, int]
    grading: float
    longest: str


def make_gym(source: Source, wanted: WantedTasks, folder: Path, cache: Path, bar: ProgressBar) -> tuple[Source, Gym]:
    """The tasks of a repository, in ``folder``, and the commit that they are of. A killed call goes on where it was.

    Raises ``ConfigError`` where tests or tasks are too few or too bad, and for a folder with other tasks.
    """
    made = folder / _MADE
    if not (folder / _SOURCE).exists():
        count = math.ceil(_SPARE * (wanted.tasks + wanted.held_out))
        plan = TaskPlan(source=source, wanted=count, **wanted.model_dump(exclude={"tasks", "held_out"}))
        if not made.exists():
            bar.update(0, count, what="making tasks")
            ENDING.run(make_tasks(plan, made, cache, lambda done, why: bar.update(done, note=why or "made one")))
        write_file(folder / _SOURCE, source.model_dump_json())
    claim(folder, {"repository": source.git, **wanted.model_dump(mode="json")})
    source = _read(folder / _SOURCE, Source)
    if not (folder / _GYM).exists():
        gym = _checked(source, wanted, folder, cache, bar)
        write_file(folder / _GYM, gym.model_dump_json(indent=1))
    return source, _read(folder / _GYM, Gym)


def _checked(source: Source, wanted: WantedTasks, folder: Path, cache: Path, bar: ProgressBar) -> Gym:
    """Check the instances, split those that pass, and write them to a file."""
    made, workers, began = folder / _MADE, max(1, (os.cpu_count() or 1) // 2), time.monotonic()
    instances = read_instances(made)
    bar.update(0, len(instances), what="checking tasks", note="")
    backend = make_backend("local", cache=cache)
    # Once: the task was made of two runs each already.
    checking = check_tasks(instances, backend, repeats=1, workers=workers, on_checked=lambda name: bar.advance())
    found = ENDING.run(checking)
    grading = (time.monotonic() - began) * workers / (2 * len(instances))
    good = {each.instance_id: each for each in instances if not found[each.instance_id]}
    tasks = [SplitTask(name, touched_files(each.patch), each.created_at) for name, each in good.items()]
    parts = split_tasks(tasks, wanted.tasks, wanted.held_out, seed=wanted.seed)
    rows = [
        good[name].model_copy(update={"extra": {**good[name].extra, "split": part}})
        for part, names in zip(("train", HELD_OUT), parts, strict=True)
        for name in names
    ]
    file = f"{source.name.replace('.', '-')}.jsonl"
    write_tasks(folder / file, rows)
    fixes = [sum(bool(good[name].created_at) for name in names) for names in parts]
    files = [len({file for task in tasks if task.id in names for file in task.files}) for names in parts]
    dropped = Counter(problems[0] for problems in found.values() if problems)
    left = len(good) - len(rows)
    return Gym(
        rows=file,
        counts=(len(parts[0]), len(parts[1])),
        fixes=(fixes[0], fixes[1]),
        files=(files[0], files[1]),
        dropped={**dropped, **({"in neither part of the split": left} if left else {})},
        grading=round(grading, 1),
        longest=max((each.problem_statement for each in good.values()), key=len),
    )


def _read[T: Frozen](file: Path, kind: type[T]) -> T:
    """Read the file of a finished stage. Raises ``StorageError`` for a damaged file."""
    try:
        return kind.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise StorageError(f"{file} cannot be read ({describe(error)}): start over with --fresh") from error


def gym_lines(gym: Gym) -> list[str]:
    """The tasks found, and why others were dropped."""
    parts = [
        f"{count} {what} ({fixes} past fixes; they change {files} {'files' if files > 1 else 'file'})"
        for count, fixes, files, what in zip(gym.counts, gym.fixes, gym.files, ("to train on", "held out"), strict=True)
    ]
    return [
        f"tasks: {', '.join(parts)}; no file is changed by both",
        *(f"  dropped: {count}: {reason:.120}" for reason, count in gym.dropped.items()),
    ]


def use_lines(result: LoopResult, model: Path, adapters: Path, *, server: str) -> list[str]:
    """How the adapter is used; ``server``: where it is in use already, empty after a run with a server of its own."""
    if result.state.adapter is None:
        return ["no adapter was made: nothing was learnt"]
    lines = [f"adapter: {result.state.adapter} in {adapters}"]
    if server:
        return [*lines, f"use it: {result.state.adapter} is served at {server}"]
    where = shlex.join(["--model", str(model), "--adapters", str(adapters)])
    return [*lines, f"use it: openhands-rl serve {where} --port 8100"]
