"""Tasks from real fixes of a git repository: commits whose tests fail without their code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.lineage import TaskLineage
from openhands_rl_plugin.evals.tasks.sources.download import SourceOrigin, open_git
from openhands_rl_plugin.evals.tasks.sources.git_repository import GitRepository
from openhands_rl_plugin.evals.tasks.sources.package_layout import is_test
from openhands_rl_plugin.evals.tasks.sources.packages import Package, TaskPlan
from openhands_rl_plugin.evals.tasks.sources.prepared_package import prepare_tree
from openhands_rl_plugin.evals.tasks.task_builder import Change, TriedBug, try_change

_LOOKED_THROUGH = 400
_MOST_FILES = 6
_TRIES_PER_TASK = 4


def fixes_of(
    package: Package, plan: TaskPlan, cache: Path, *, known: Mapping[str, TriedBug], tried: Callable[[TriedBug], None]
) -> tuple[list[Instance], list[TaskLineage]]:
    """Up to half of ``per_package`` tasks from the newest fixes; none without a git repository."""
    if package.git is None:
        return [], []
    repository, wanted = open_git(package, cache), plan.per_package // 2
    instances: list[Instance] = []
    lineage: list[TaskLineage] = []
    for at, commit in enumerate(_fixes(repository, package.commit)):
        if len(instances) == wanted or at == wanted * _TRIES_PER_TASK:
            break
        result = known.get(commit[:12])
        if result is None:
            result = _opened_again(repository, package, plan, commit, cache)
            tried(result)
        if result.instance is not None and result.lineage is not None:
            instances.append(result.instance)
            lineage.append(result.lineage)
    return instances, lineage


def _fixes(repository: GitRepository, head: str) -> Iterator[str]:
    """Commits, newest first, that change Python code and Python tests, and few other files."""
    log = repository.text(
        *("log", "--first-parent", "--no-merges", f"--max-count={_LOOKED_THROUGH}", "--format=%x00%H %P"),
        *("--name-status", "--no-renames", head),
    )
    for entry in log.split("\0")[1:]:
        first, _, rest = entry.partition("\n")
        files = [line.split("\t") for line in rest.splitlines() if "\t" in line]
        python = [path for status, path in files if path.endswith(".py") and status == "M"]
        tests = [path for path in python if is_test(path)]
        if len(first.split()) == 2 and tests and len(python) > len(tests) and len(python) <= _MOST_FILES:
            yield first.split()[0]


def _opened_again(repository: GitRepository, package: Package, plan: TaskPlan, commit: str, cache: Path) -> TriedBug:
    """The task of one fix: the code before it, with the tests after it."""
    fixed, before = repository.tree(commit), repository.tree(f"{commit}^")
    code = {
        path: before.text(path)
        for path in sorted(fixed.files)
        if path.endswith(".py")
        and not is_test(path)
        and path in before.files
        and fixed.files[path] != before.files[path]
    }
    origin = SourceOrigin(kind="git", name=package.name, version=commit[:8], pin=commit, place=package.git or "")
    try:
        prepared = prepare_tree(package, plan, origin, fixed, None, cache)
    except ConfigError as error:
        return TriedBug(key=commit[:12], reason=str(error))
    path = next(iter(code), "")
    return try_change(prepared, Change(key=commit[:12], path=path), fixed.changed(code))
