"""Repair tasks of one repository, its own functions with bugs: some to train on, the others held out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import HELD_OUT
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.bubblewrap import find_bubblewrap
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.lineage import TaskLineage, lineage_path, read_lineage, write_tasks
from openhands_rl_plugin.evals.tasks.repair.making import RepairPlan, checked_functions, tasks_of
from openhands_rl_plugin.evals.tasks.repair.rows import spec_of
from openhands_rl_plugin.evals.tasks.sources.download import fetch
from openhands_rl_plugin.evals.tasks.sources.own_repository import OwnRepository
from openhands_rl_plugin.evals.tasks.sources.package_layout import layout_of
from openhands_rl_plugin.evals.tasks.sources.packages import Package
from openhands_rl_plugin.evals.tasks.split import LEAST_HELD_OUT, LEAST_TRAINING, SplitTask, split_tasks

TRAIN = "train"
ROWS = "own.jsonl"
_SEED = 1  # whatever the run's: runs with other seeds are evaluated on the same tasks
_A_FUNCTION, _AT_MOST = 4, 400
_LEAST_FUNCTIONS = 4


class OwnTasks(Frozen):
    """The tasks of a repository at ``commit``, as rows that say nothing of where the bug is (``at_level``)."""

    name: str
    commit: str
    training: tuple[Instance, ...]
    held_out: tuple[Instance, ...]

    def lines(self) -> tuple[str, ...]:
        """What there is, for a person."""
        parts = [
            f"{len(rows)} {what} ({len(_functions(rows))} functions in {_counted(len(_files(rows)), 'file')})"
            for rows, what in ((self.training, "to train on"), (self.held_out, "held out"))
        ]
        shared = _files(self.training) & _files(self.held_out)
        apart = "functions, in the same files" if shared else "files"
        return (f"tasks of {self.name}: {', '.join(parts)}; they are apart by {apart}",)


def own_tasks(
    repository: OwnRepository,
    folder: Path,
    cache: Path,
    *,
    most_held_out: int,
    tests: tuple[str, ...] = (),
    requirements: tuple[str, ...] = (),
) -> OwnTasks:
    """The tasks of a repository: those in ``folder``, where they are left, else made now.

    Half of them are held out, ``most_held_out`` at most, in files that no other task changes, or else in other
    functions. ``tests``: pytest's arguments (empty: the folders that are found); ``requirements``: installed beside
    what the repository declares. Raises ``ConfigError`` without bubblewrap and where there are too few functions, and
    ``InfrastructureError`` where what the tests need cannot be installed.
    """
    file = folder / ROWS
    if not lineage_path(file).exists():  # it is written after the rows
        made = _made(repository, cache, tests, requirements)
        rows = _divided(made, most_held_out)
        folder.mkdir(parents=True, exist_ok=True)
        lineage = {entry.instance_id: entry for _, entry in made}
        write_tasks(file, rows, [lineage[each.instance_id] for each in rows])
    rows, known = read_instances(file), read_lineage(file)
    if known is None or not known.tasks:
        raise ConfigError(f"{file} has lost its lineage: start over with --fresh")
    training, held_out = (tuple(each for each in rows if each.extra["split"] == part) for part in (TRAIN, HELD_OUT))
    commit = str(known.tasks[0].source["commit"])
    return OwnTasks(name=repository.name, commit=commit, training=training, held_out=held_out)


def _made(
    repository: OwnRepository, cache: Path, tests: tuple[str, ...], requirements: tuple[str, ...]
) -> list[tuple[Instance, TaskLineage]]:
    find_bubblewrap()
    package = Package(name=repository.name, git=str(repository.root), commit=repository.commit, tests=tests)
    layout = layout_of(fetch(package, cache)[1])
    if not layout.code:
        raise ConfigError(f"--repo {repository.root}: no Python code found in it beside the tests")
    package = package.model_copy(update={"requirements": (*layout.requirements, *requirements)})
    plan = RepairPlan(packages=(package,), per_function=_A_FUNCTION, per_package=_AT_MOST, seed=_SEED)
    # Of those that share a name the first: a task is named after its function.
    functions = [*{each.sliced.name: each for each in reversed(checked_functions(package, plan, cache))}.values()]
    made = list(tasks_of(package, plan, functions, Counter()))[: plan.per_package]
    if len(made) < LEAST_TRAINING + LEAST_HELD_OUT or len(functions) < _LEAST_FUNCTIONS:
        raise ConfigError(_too_few(repository, f"{len(made)} tasks of {_counted(len(functions), 'function')}"))
    return made


def _divided(made: list[tuple[Instance, TaskLineage]], most_held_out: int) -> list[Instance]:
    """The rows with their split. Raises ``ConfigError`` where one function has nearly all of them."""
    tasks = [
        SplitTask(id=row.instance_id, files=frozenset({entry.path}), function=entry.function) for row, entry in made
    ]
    held_out = max(LEAST_HELD_OUT, min(most_held_out, len(tasks) // 2))
    split = split_tasks(tasks, len(tasks) - held_out, held_out, seed=_SEED)
    parts = {**dict.fromkeys(split.training, TRAIN), **dict.fromkeys(split.held_out, HELD_OUT)}
    return [
        row.model_copy(update={"extra": {**row.extra, "split": parts[row.instance_id]}})
        for row, _ in made
        if row.instance_id in parts
    ]


def _too_few(repository: OwnRepository, found: str) -> str:
    return (
        f"--repo {repository.root}: {found}, and at least {LEAST_TRAINING} tasks to train on and {LEAST_HELD_OUT} held "
        f"out, of {_LEAST_FUNCTIONS} functions, are needed. Used are functions of modules, of 3 to 25 lines, that need "
        "no other package, and that its tests or doctests call with plain values (texts, numbers, lists of them). "
        "Where tests fail for want of a package, name it (--with); where they are not found, name them (--tests); "
        "`openhands-rl improve` makes tasks of any code"
    )


def _functions(rows: tuple[Instance, ...]) -> set[tuple[str, str]]:
    return {(spec.path, spec.function) for spec in map(spec_of, rows)}


def _files(rows: tuple[Instance, ...]) -> set[str]:
    return {spec_of(each).path for each in rows}


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
