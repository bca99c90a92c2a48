"""The gym of a repository: what its tests say, tasks that went through the gate, their split, and what a run earned."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from openhands_rl_plugin.apps.loop.reporting import evaluations
from openhands_rl_plugin.apps.loop.run import LoopResult
from openhands_rl_plugin.cli.terminal import ENDING
from openhands_rl_plugin.core.errors import ConfigError, StorageError, describe
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.records import HELD_OUT
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.evals.runs.backends import make_backend
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.patches import touched_files
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.gate import (
    OnProgress,
    TaskLineage,
    check_tasks,
    lineage_path,
    write_tasks,
)
from openhands_rl_plugin.evals.tasks.packages import OwnRepository, Package, TaskPlan
from openhands_rl_plugin.evals.tasks.sandbox import prepare_package
from openhands_rl_plugin.evals.tasks.split import LEAST_HELD_OUT, LEAST_TRAINING, TRAIN, SplitTask, split_tasks
from openhands_rl_plugin.evals.tasks.suite import REOPENED, TRIES_PER_TASK, make_suite
from openhands_rl_plugin.trajectories.view import ProgressBar

_LEAST_STEADY = 0.5


class Survey(Frozen):
    """Two runs of the tests. ``steady`` ones passed twice; only they are used. ``unnamed`` ones have names
    that a log cannot show. ``files``: of code. ``seconds``: of one
    run. ``size``: of all files, in bytes.
    """

    tests: int
    steady: int
    failing: int
    flickering: int
    unnamed: int
    files: int
    seconds: float
    size: int

    def notes(self) -> tuple[str, ...]:
        """What is not used, one line each."""
        found = (
            (self.failing, "fail before any bug"),
            (self.flickering, "flicker (pass in one run only) before any bug"),
            (self.unnamed, "have names that are not read off a log as they are (line breaks, brackets)"),
        )
        return tuple(f"{count} of {self.tests} tests {what}: they are not used" for count, what in found if count)


def survey(package: Package, plan: TaskPlan, cache: Path) -> Survey:
    """Run the tests twice, without a bug.

    Raises ``ConfigError`` where there are none, none passes, or fewer than half of them pass twice, and
    ``InfrastructureError`` where what they need cannot be installed.
    """
    prepared = prepare_package(package, plan, cache)
    run = prepared.first_run
    ran = {name: outcome for name, outcome in run.outcomes.items() if outcome not in ("skipped", "xfailed")}
    flickering = sorted(prepared.flickering)
    failing = sorted(ran.keys() - run.passed - prepared.flickering)
    found = Survey(
        tests=len(ran.keys() | prepared.flickering),
        steady=len(prepared.tests),
        failing=len(failing),
        flickering=len(flickering),
        unnamed=len(run.passed - prepared.tests - prepared.flickering),
        files=len(prepared.layout.code),
        seconds=round(run.seconds, 1),
        size=sum(len(file.data) for file in prepared.tree.files.values()),
    )
    if found.failing + found.flickering > (1 - _LEAST_STEADY) * found.tests:
        what = f"{found.failing} fail and {found.flickering} flicker"
        raise ConfigError(
            f"{package.label}: of {found.tests} tests, {what} before any bug ({(failing or flickering)[0]:.100}): mend "
            "them, install what they need (--with), or name those that pass (--tests)"
        )
    return found


_REPOSITORY, _SURVEY, _MADE, _GYM = "repository.json", "survey.json", "made.jsonl", "gym.json"
_TRIED = "tried.txt"
_SPARE = 1.25
"""Tasks made for each that is wanted: the gate and the split drop some."""

_REPEATS = 1
"""Runs of the gate with the fix, and without: the task was made of two runs each already."""

_RUNS = (2, 2 + TRIES_PER_TASK - 1)
"""Runs of the tests for a task: two with its bug, and one for each change before it that is none."""
_BASICS = TaskPlan.model_fields["requirements"].default


class WantedTasks(Frozen):
    """What tasks are wanted. ``tests``: pytest's arguments; ``requirements``: installed for them; ``timeout``: seconds
    of one run of the tests.
    """

    tasks: int = Field(ge=LEAST_TRAINING, le=500)
    held_out: int = Field(ge=LEAST_HELD_OUT, le=500)
    seed: int = 1
    python: str = Field(default="3.12", pattern=r"^3\.1\d$")
    tests: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    timeout: float = Field(default=60.0, gt=0)


class Gym(Frozen):
    """The tasks of a repository. ``training`` and ``held_out``: names of files of rows, in the folder of the tasks.

    ``tried``: changes that were tried. ``fixes``: tasks that are fixes of the history. ``dropped``: reason -> how
    many candidates. ``grading``: seconds in which one patch is graded, a mean.
    """

    survey: Survey
    training: str
    held_out: str
    counts: tuple[int, int]
    fixes: tuple[int, int]
    files: tuple[int, int]
    tried: int
    dropped: dict[str, int]
    grading: float
    longest: str
    """The longest text of a task's problem."""
    split_by: Literal["file", "function"] = "file"
    """What no two tasks of different parts change."""


class _GymProgress:
    """Shows what is being done: as a bar on a terminal, as lines on stderr elsewhere. ``file`` keeps the reasons of a
    run that may be killed: a line for each change that was tried."""

    def __init__(self, bar: ProgressBar, file: Path) -> None:
        self._bar = bar
        self._file = file

    def stage(self, what: str, total: int | None = None) -> None:
        self._bar.update(0, total, what=what, note="")
        self._print(what)

    def tried(self, package: Package, made: int, reason: str) -> None:
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(f"{' '.join(reason.split())}\n")
        note = reason or "made one"
        self._bar.update(made, note=note)
        self._print(f"  {made} tasks; {note}")

    def checked(self, done: int, total: int, last: str) -> None:
        self._bar.update(done, total, note=last)
        self._print(f"  {done} of {total} checked; {last}")

    def _print(self, line: str) -> None:
        if not self._bar.drawn:
            self._bar.print(line)


def pinned(repository: OwnRepository, folder: Path) -> OwnRepository:
    """The repository with the commit that ``folder`` was begun with, or begins with now."""
    before = _read(folder / _REPOSITORY, OwnRepository)
    if before is None:
        write_file(folder / _REPOSITORY, repository.model_dump_json(indent=1), parents=True)
    return repository if before is None else repository.model_copy(update={"commit": before.commit})


def forget_unsurveyed(folder: Path) -> None:
    """Empty a folder of tasks in which no survey has succeeded, so that other options, and a newer commit, count."""
    if not (folder / _SURVEY).exists():
        shutil.rmtree(folder, ignore_errors=True)


def make_gym(repository: OwnRepository, options: WantedTasks, folder: Path, cache: Path, bar: ProgressBar) -> Gym:
    """The tasks of a repository, in ``folder``. A killed call goes on where it was.

    Raises ``ConfigError`` where tests or tasks are too few or too bad, and as ``make_suite`` and the gate do.
    """
    if (known := _read(folder / _GYM, Gym)) is not None:
        return known
    package = Package(name=repository.name, git=str(repository.root), commit=repository.commit, tests=options.tests)
    plan = TaskPlan(
        packages=(package,),
        python=options.python,
        requirements=(*_BASICS, *options.requirements),
        per_package=math.ceil(_SPARE * (options.tasks + options.held_out)),
        seed=options.seed,
        timeout=options.timeout,
        least_share=0.0,
    )
    found, progress = _read(folder / _SURVEY, Survey), _GymProgress(bar, folder / _TRIED)
    if found is None:
        progress.stage("running the tests")
        found = survey(package, plan, cache)
        write_file(folder / _SURVEY, found.model_dump_json(indent=1), parents=True)
    made = folder / _MADE
    if not lineage_path(made).exists():  # it is written after the rows
        shortest, longest = (plan.per_package * runs * found.seconds / 60 for runs in _RUNS)
        progress.stage(f"making tasks, in {shortest:.0f} to {longest:.0f} min", plan.per_package)
        make_suite(plan, made, cache, progress.tried)
    instances = read_instances(made)
    progress.stage("checking tasks", len(instances))
    checked, grading = ENDING.run(_gated(made, cache, progress.checked))
    gym = _divided(repository, options, folder, found, instances, checked, grading)
    write_file(folder / _GYM, gym.model_dump_json(indent=1))
    return gym


async def _gated(made: Path, cache: Path, on_progress: OnProgress) -> tuple[dict[str, TaskLineage], float]:
    """Task -> what the gate found, and the seconds in which one patch is graded."""
    workers = max(1, (os.cpu_count() or 1) // 2)
    backend, began = make_backend("local", cache=cache), time.monotonic()
    try:
        found = await check_tasks(made, backend, repeats=_REPEATS, workers=workers, on_progress=on_progress)
    finally:
        await backend.close()
    seconds = (time.monotonic() - began) * workers / (2 * _REPEATS * len(found.tasks))
    return {task.instance_id: task for task in found.tasks}, round(seconds, 1)


def _problems(task: TaskLineage) -> tuple[str, ...]:
    assert task.check is not None, "the gate checks every task"
    return task.check.problems


def _divided(
    repository: OwnRepository,
    options: WantedTasks,
    folder: Path,
    found: Survey,
    instances: Sequence[Instance],
    checked: Mapping[str, TaskLineage],
    grading: float,
) -> Gym:
    """Split what passed the gate, and write the rows of both parts."""
    good = [each for each in instances if not _problems(checked[each.instance_id])]
    lines = (folder / _TRIED).read_text(encoding="utf-8").splitlines() if (folder / _TRIED).exists() else []
    reasons = Counter(_without_counts(line) for line in lines if line)
    bad = map(_problems, checked.values())
    reasons += Counter(_without_counts(problems[0]) for problems in bad if problems)
    fixes = {each.instance_id: _commit(each) for each in good if checked[each.instance_id].modifier == REOPENED}
    times = repository.times(set(fixes.values()))
    described_tasks = [
        SplitTask(
            id=name,
            files=touched_files(each.patch),
            time=times[fixes[name]] if name in fixes else None,
            function=checked[name].function,
        )
        for each in good
        for name in (each.instance_id,)
    ]
    try:
        split = split_tasks(described_tasks, options.tasks, options.held_out, seed=options.seed)
    except ConfigError as error:
        raise ConfigError(f"{repository.name}: {error}; of {len(lines)} changes tried, {counted(reasons)}") from error
    parts: list[str] = []
    for part, ids, suffix in ((TRAIN, split.training, ""), (HELD_OUT, split.held_out, "-heldout")):
        chosen = [each for each in good if each.instance_id in ids]
        rows = [each.model_copy(update={"extra": {**each.extra, "split": part}}) for each in chosen]
        parts.append(f"{repository.name.replace('.', '-')}{suffix}.jsonl")
        write_tasks(folder / parts[-1], rows, [checked[each.instance_id] for each in chosen])
    sides = (split.training, split.held_out)
    return Gym(
        survey=found,
        training=parts[0],
        held_out=parts[1],
        counts=(len(split.training), len(split.held_out)),
        fixes=(sum(name in fixes for name in sides[0]), sum(name in fixes for name in sides[1])),
        files=(_files(described_tasks, sides[0]), _files(described_tasks, sides[1])),
        tried=len(lines),
        dropped=dict((reasons + Counter(split.dropped.values())).most_common()),
        grading=grading,
        longest=max((each.problem_statement for each in good), key=len),
        split_by=split.by,
    )


def counted(reasons: Mapping[str, int]) -> str:
    """``"12: no test notices it; 3: two runs with the bug differ"``."""
    return (
        "; ".join(f"{count}: {reason:.120}" for reason, count in Counter(reasons).most_common()) or "none was dropped"
    )


def _without_counts(reason: str) -> str:
    """The reason without what differs from task to task, so that equal ones are counted together."""
    reason = re.sub(r"^\d+ of \d+ tests fail$", "too few or too many tests fail", reason)
    return re.sub(r"^it is \S+ once more$", "another task is the same", reason)


def _files(tasks: Sequence[SplitTask], ids: Sequence[str]) -> int:
    return len({file for task in tasks if task.id in ids for file in task.files})


def _commit(instance: Instance) -> str:
    source = instance.extra.get("source")
    return str(source.get("commit", "")) if isinstance(source, dict) else ""


def _read[T: Frozen](file: Path, kind: type[T]) -> T | None:
    """What a finished stage left; ``None`` before it. Raises ``StorageError`` for a damaged file."""
    try:
        return kind.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise StorageError(f"{file} cannot be read ({describe(error)}): start over with --fresh") from error


_SAME_FILES = (
    "  the files are too few to be split: both parts read the same ones, so the result says what was learnt of this "
    "code, and less about code that is new",
)


def gym_lines(gym: Gym) -> list[str]:
    """The tasks found, and why others were dropped."""
    survey, parts = gym.survey, []
    for count, fixes, files, what in (
        (gym.counts[0], gym.fixes[0], gym.files[0], "to train on"),
        (gym.counts[1], gym.fixes[1], gym.files[1], "held out"),
    ):
        parts.append(f"{count} {what} ({fixes} past fixes; they change {files} {'files' if files > 1 else 'file'})")
    apart = f"no {gym.split_by} is changed by both"
    return [
        f"tests: {survey.steady} pass in every run, {survey.seconds:.1f} s for one",
        *(f"  {note}" for note in survey.notes()),
        f"tasks: {', '.join(parts)}; {apart}",
        *(_SAME_FILES if gym.split_by == "function" else ()),
        f"  {gym.tried} changes tried; dropped: {counted(gym.dropped)}",
    ]


def earned_lines(result: LoopResult) -> list[str]:
    """Success on held-out tasks before and after, each with its 95% interval, and the change."""
    lines = []
    measured = evaluations(result.state)
    for one, what in zip((measured[0], measured[-1]), ("before", "after"), strict=True):
        success = one.success
        rate = (
            f"{success.mean:.2f} (95% interval {success.low:.2f} to {success.high:.2f})"
            if success.n
            else "nothing valid"
        )
        lines.append(f"held-out tasks {what}: {rate}, {success.n} tasks")
    return [*lines, *(change.sentence() for change in result.changes)]


def use_lines(result: LoopResult, model: Path, adapters: Path, *, server: str) -> list[str]:
    """How the adapter is used; ``server``: where it is in use already, empty after a run with a server of its own."""
    if result.state.adapter is None:
        return ["no adapter was made: nothing was learnt"]
    lines = [f"adapter: {result.state.adapter} in {adapters}"]
    if server:
        return [*lines, f"use it: {result.state.adapter} is served at {server}"]
    where = shlex.join(["--model", str(model), "--adapters", str(adapters)])
    return [*lines, f"use it: openhands-rl serve {where} --port 8100"]


def earned(result: LoopResult) -> JsonObject:
    """The same for a program: the stages that measured, and the changes."""
    return {
        "evaluations": [one.model_dump(mode="json") for one in evaluations(result.state)],
        "changes": [change.model_dump(mode="json") for change in result.changes],
        "adapter": result.state.adapter,
        "report": str(result.report),
    }
