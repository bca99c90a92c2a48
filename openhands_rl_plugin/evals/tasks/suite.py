"""Makes one file of tasks from many packages, with a journal, so that a killed run can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.bubblewrap import find_bubblewrap
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.git_fixes import fixes_of
from openhands_rl_plugin.evals.tasks.lineage import TaskLineage, write_tasks
from openhands_rl_plugin.evals.tasks.sources.packages import Package, TaskPlan
from openhands_rl_plugin.evals.tasks.sources.prepared_package import prepare_package
from openhands_rl_plugin.evals.tasks.task_builder import TriedBug, make_tasks


class Progress(Protocol):
    """Callbacks for the progress of a run."""

    def package(self, label: str, at: int, of: int) -> None:
        """A package begins."""
        ...

    def tried(self, made: int, wanted: int, reason: str) -> None:
        """A bug was tried; ``reason``: why it is no task; empty when it is one."""
        ...


class SuiteSummary(Frozen):
    """The result of a run, and one line for each package with fewer tasks than requested."""

    tasks: int
    packages: int
    problems: tuple[str, ...] = ()


class _Finished(Frozen):
    """The line of the journal that ends a package."""

    package: str
    instances: tuple[Instance, ...]
    lineage: tuple[TaskLineage, ...]


class _Journal:
    """The bugs tried so far, one on each line. A journal of another plan is refused."""

    def __init__(self, path: Path, plan: TaskPlan) -> None:
        self._path = path
        self._head = hashlib.sha256(plan.model_dump_json(exclude={"packages"}).encode()).hexdigest()
        self.tried: dict[str, dict[str, TriedBug]] = {}
        self.finished: dict[str, _Finished] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if lines and lines[0] != self._head:
            raise ConfigError(f"{path} is the journal of a run with other settings: finish that, or delete the file")
        self._read(lines[1:])

    def _read(self, lines: Sequence[str]) -> None:
        for line in lines:
            name, _, entry = line.partition("\t")
            try:
                if name == "finished":
                    done = _Finished.model_validate_json(entry)
                    self.finished[done.package] = done
                else:
                    result = TriedBug.model_validate_json(entry)
                    self.tried.setdefault(name, {})[result.key] = result
            except ValidationError:
                continue  # the line that was being written when the run was killed

    def add(self, name: str, entry: TriedBug | _Finished) -> None:
        """Append a line; complete lines survive a kill."""
        new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{self._head}\n" if new else "")
            file.write(f"{name}\t{entry.model_dump_json()}\n")

    def remove(self) -> None:
        """Delete the journal of a finished run."""
        self._path.unlink(missing_ok=True)


def make_suite(plan: TaskPlan, out: Path, cache: Path, progress: Progress) -> SuiteSummary:
    """Make the tasks of a plan and write them to ``out``, with their lineage beside it.

    Unusable packages are in ``problems``. Raises ``ConfigError`` without bubblewrap, for a journal of
    other settings, and when no package gave a task.
    """
    find_bubblewrap()
    journal = _Journal(out.with_name(f".{out.name}.journal"), plan)
    instances: list[Instance] = []
    lineage: list[TaskLineage] = []
    problems: list[str] = []
    for at, package in enumerate(plan.packages):
        progress.package(package.label, at, len(plan.packages))
        key = hashlib.sha256(package.model_dump_json().encode()).hexdigest()[:16]
        done = journal.finished.get(key)
        if done is None:
            try:
                done = _finished(plan, package, key, journal, cache, progress.tried)
            except RLError as error:
                problems.append(str(error))
                continue
        if len(done.instances) < plan.per_package:
            problems.append(
                f"{package.label}: {len(done.instances)} of {plan.per_package} tasks, no more bugs are good"
            )
        instances += done.instances
        lineage += done.lineage
    if not instances:
        raise ConfigError("\n".join(problems) or "no task was made")
    write_tasks(out, instances, lineage)
    journal.remove()
    return SuiteSummary(tasks=len(instances), packages=len({each.repo for each in instances}), problems=tuple(problems))


def _finished(
    plan: TaskPlan,
    package: Package,
    key: str,
    journal: _Journal,
    cache: Path,
    on_progress: Callable[[int, int, str], None],
) -> _Finished:
    known = journal.tried.get(key, {})
    made = sum(each.instance is not None for each in known.values())

    def tried(result: TriedBug) -> None:
        nonlocal made
        made += result.instance is not None
        journal.add(key, result)
        on_progress(made, plan.per_package, result.reason)

    instances, lineage = fixes_of(package, plan, cache, known=known, tried=tried)
    left = plan.per_package - len(instances)
    if left > 0:
        prepared = prepare_package(package, plan, cache)
        more, their_lineage = make_tasks(prepared, left, known=known, tried=tried)
        instances, lineage = [*instances, *more], [*lineage, *their_lineage]
    done = _Finished(package=key, instances=tuple(instances), lineage=tuple(lineage))
    journal.add("finished", done)
    return done
