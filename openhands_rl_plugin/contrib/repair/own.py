"""Repair tasks of one repository, its own functions with bugs: some to train on, the others held out."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from openhands_rl_plugin.contrib.repair.making import Recorded, RepairPlan, checked_functions, tasks_of
from openhands_rl_plugin.contrib.repair.rows import spec_of
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import file_sha256
from openhands_rl_plugin.core.records import HELD_OUT
from openhands_rl_plugin.core.transcript import counted
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.bubblewrap import find_bubblewrap
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.lineage import TaskLineage, read_lineage, write_tasks
from openhands_rl_plugin.evals.tasks.sources.download import fetch
from openhands_rl_plugin.evals.tasks.sources.own_repository import OwnRepository
from openhands_rl_plugin.evals.tasks.sources.package_layout import layout_of
from openhands_rl_plugin.evals.tasks.sources.packages import Package
from openhands_rl_plugin.evals.tasks.split import LEAST_HELD_OUT, LEAST_TRAINING, TRAIN, SplitTask, split_tasks

ROWS = "own.jsonl"
_SEED = 1  # whatever the run's: runs with other seeds are evaluated on the same tasks
_A_FUNCTION, _AT_MOST = 4, 400
_LEAST_FUNCTIONS = 4
_LEAST_KEPT = 0.7
"""The share of the tasks below which a split by file is given up for one by function."""


class OwnTasks(Frozen):
    """The tasks of a repository at ``commit``, as rows that say nothing of where the bug is (``at_level``)."""

    name: str
    commit: str
    training: tuple[Instance, ...]
    held_out: tuple[Instance, ...]

    def line(self) -> str:
        """What there is, for a person."""
        parts = [
            f"{len(rows)} {what} ({counted(_functions(rows), 'function')} in {counted(len(_files(rows)), 'file')})"
            for rows, what in ((self.training, "to train on"), (self.held_out, "held out"))
        ]
        shared = _files(self.training) & _files(self.held_out)
        apart = "functions, in the same files" if shared else "files"
        return f"tasks of {self.name}: {', '.join(parts)}; they are apart by {apart}"


def make_own_tasks(
    repository: OwnRepository,
    folder: Path,
    cache: Path,
    *,
    most_held_out: int,
    tests: tuple[str, ...] = (),
    requirements: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Make the tasks of a repository, which ``own_tasks`` reads from ``folder``. Lines on what is missing among them.

    Half of them are held out, ``most_held_out`` at most, in files that no other task changes, or in other functions
    where that would leave too many out. No task to train on shows a held-out function. ``tests``: pytest's arguments
    (empty: the folders that are found); ``requirements``: installed beside what the repository declares. Raises
    ``ConfigError`` without bubblewrap and where there are too few functions, and ``InfrastructureError`` where what the
    tests need cannot be installed.
    """
    made, recorded = _made(repository, cache, tests, requirements)
    parts = _divided(made, most_held_out)
    if len({*parts.values()}) < 2:
        made_of = f"{len(made)} tasks, of functions that cannot be divided, as most of them call each other"
        raise ConfigError(_too_few(repository, made_of))
    kept = [(row, entry) for row, entry in made if row.instance_id in parts]
    rows = [row.model_copy(update={"extra": {**row.extra, "split": parts[row.instance_id]}}) for row, _ in kept]
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder / ROWS, rows, [entry for _, entry in kept])
    notes: list[str] = []
    if why := _why(recorded):
        notes.append(f"there would be more tasks{why}: see --with and --tests, and start over with --fresh")
    if left := len(made) - len(kept):
        notes.append(f"{counted(left, 'task')} would show what is held out, or unbalance the parts: left out")
    return tuple(notes)


def own_tasks(folder: Path, name: str) -> OwnTasks | None:
    """What ``make_own_tasks`` left of the repository with that name; ``None`` before it has ended.

    Raises ``ConfigError`` for rows that have changed since.
    """
    file = folder / ROWS
    known = read_lineage(file)  # it is written after the rows
    if known is None:
        return None
    if not file.exists() or known.sha256 != file_sha256(file):
        raise ConfigError(f"{file} has changed since it was made: start over with --fresh")
    rows = read_instances(file)
    training, held_out = (tuple(each for each in rows if each.extra["split"] == part) for part in (TRAIN, HELD_OUT))
    commit = str(known.tasks[0].source["commit"])
    return OwnTasks(name=name, commit=commit, training=training, held_out=held_out)


def shown_functions(instance: Instance) -> frozenset[str]:
    """The functions that a task shows: its own, and those that come along because it needs them."""
    spec = spec_of(instance)
    tree = ast.parse(spec.files[spec.path])
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _made(
    repository: OwnRepository, cache: Path, tests: tuple[str, ...], requirements: tuple[str, ...]
) -> tuple[list[tuple[Instance, TaskLineage]], Recorded]:
    find_bubblewrap()
    package = Package(name=repository.name, git=str(repository.root), commit=repository.commit, tests=tests)
    layout = layout_of(fetch(package, cache)[1])
    if not layout.code:
        raise ConfigError(f"--repo {repository.root}: no Python code found in it beside the tests")
    package = package.model_copy(update={"requirements": (*layout.requirements, *requirements)})
    plan = RepairPlan(packages=(package,), per_function=_A_FUNCTION, per_package=_AT_MOST, seed=_SEED)
    found, recorded = checked_functions(package, plan, cache)
    # Of those that share a name the first: a task is named after its function.
    functions = [*{each.sliced.name: each for each in reversed(found)}.values()]
    made = list(tasks_of(package, plan, functions, Counter()))[: plan.per_package]
    if len(made) < LEAST_TRAINING + LEAST_HELD_OUT or len(functions) < _LEAST_FUNCTIONS:
        what = f"{counted(len(made), 'task')} of {counted(len(functions), 'function')}"
        raise ConfigError(_too_few(repository, f"{what}{_why(recorded)}"))
    return made, recorded


def _divided(made: Sequence[tuple[Instance, TaskLineage]], most_held_out: int) -> dict[str, str]:
    """Task -> its part; empty where there are no two parts.

    By file, without tasks to train on that show a held-out function; by function where that leaves too many out: those
    that one task shows stay together.
    """
    shows = {row.instance_id: shown_functions(row) for row, _ in made}
    files = {row.instance_id: entry.path for row, entry in made}
    functions = {row.instance_id: entry.function for row, entry in made}
    together = _together(shows.values())
    half = max(LEAST_HELD_OUT, min(most_held_out, len(made) // 2))
    for keys in (files, {task: together[function] for task, function in functions.items()}):
        tasks = [SplitTask(id=task, files=frozenset({key})) for task, key in keys.items()]
        try:
            split = split_tasks(tasks, len(tasks) - half, half, seed=_SEED)
        except ConfigError:
            continue
        held_out = {functions[task] for task in split.held_out}
        training = [task for task in split.training if shows[task].isdisjoint(held_out)]
        if len(training) >= LEAST_TRAINING and len(training) + len(split.held_out) >= _LEAST_KEPT * len(tasks):
            return {**dict.fromkeys(training, TRAIN), **dict.fromkeys(split.held_out[:most_held_out], HELD_OUT)}
    return {}


def _together(groups: Iterable[frozenset[str]]) -> dict[str, str]:
    """Function -> one that stands for all that are shown with it, directly or through others."""
    of: dict[str, set[str]] = {}
    for group in groups:
        joined = {*group}.union(*(of.get(name, ()) for name in group))
        of.update(dict.fromkeys(joined, joined))
    return {name: min(joined) for name, joined in of.items()}


def _why(recorded: Recorded) -> str:
    """What stood in the way, as far as it is known."""
    if recorded.late:
        return ", as its tests did not end in time"
    if recorded.broken:
        file, reason = next(iter(recorded.broken.items()))
        return f", as {counted(len(recorded.broken), 'file')} of tests cannot be imported ({file:.80}: {reason:.120})"
    return ""


def _too_few(repository: OwnRepository, found: str) -> str:
    return (
        f"--repo {repository.root}: {found}; at least {LEAST_TRAINING} tasks to train on and {LEAST_HELD_OUT} held "
        f"out, of {_LEAST_FUNCTIONS} functions, are needed. Used are functions of modules, of 3 to 25 lines, that need "
        "no other package, and that its tests or doctests call with plain values (texts, numbers, lists of them). "
        "Where tests fail for want of a package, name it (--with); where they are not found, or too slow, name some "
        "(--tests); `openhands-rl improve` makes tasks of any code"
    )


def _functions(rows: tuple[Instance, ...]) -> int:
    return len({spec_of(each).function for each in rows})


def _files(rows: tuple[Instance, ...]) -> set[str]:
    return {spec_of(each).path for each in rows}
