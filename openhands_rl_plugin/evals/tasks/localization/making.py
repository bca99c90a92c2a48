"""Makes localization tasks of the history of a git repository: one for each small fix, nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.lineage import TaskLineage, write_tasks
from openhands_rl_plugin.evals.tasks.localization.backend import places_of_patch
from openhands_rl_plugin.evals.tasks.localization.rows import LOCALIZATION, LocalizationSpec, spec_of
from openhands_rl_plugin.evals.tasks.localization.statements import is_fix, statement_of
from openhands_rl_plugin.evals.tasks.sources.download import open_git
from openhands_rl_plugin.evals.tasks.sources.git_repository import GitRepository
from openhands_rl_plugin.evals.tasks.sources.package_layout import is_code
from openhands_rl_plugin.evals.tasks.sources.packages import Package

HELD_OUT_SHARE = 0.2
"""The newest of a repository's tasks are held out, at least one."""

_LOOKED_THROUGH = 20_000
_MOST_FILES, _MOST_FUNCTIONS = 4, 10


class LocalizationPlan(Frozen):
    """Repositories, and how many tasks are wanted of each."""

    packages: tuple[Package, ...]
    per_package: int = 100


class Made(NamedTuple):
    """What was made. ``named`` is the number of tasks whose commit's message named a place of its fix."""

    tasks: int
    packages: int
    named: int
    problems: tuple[str, ...]


class _Commit(NamedTuple):
    commit: str
    parent: str
    date: str
    message: str
    code: tuple[str, ...]


def make_localization(
    plan: LocalizationPlan, out: Path, cache: Path, on_progress: Callable[[str, int, str], None]
) -> Made:
    """Write the rows and their lineage. ``on_progress`` gets package, tasks so far, and why the last commit is none.

    The result depends on the repositories alone. Raises ``ConfigError`` where no task can be made.
    """
    instances: list[Instance] = []
    problems: list[str] = []
    for package in plan.packages:
        if package.git is None:
            raise ConfigError(f"{package.label}: --localization needs a git repository, for its history")
        repository = open_git(package, cache)
        found: list[Instance] = []
        for commit in _small_changes(repository, package):
            made = _task(repository, package, commit)
            found += [made] if isinstance(made, Instance) else []
            on_progress(package.name, len(found), made if isinstance(made, str) else "")
            if len(found) == plan.per_package:
                break
        if len(found) < plan.per_package:
            problems.append(
                f"{package.name}: {len(found)} of {plan.per_package} tasks, no more commits are small fixes"
            )
        instances += _split_by_time(found)
    if not instances:
        raise ConfigError("\n".join(problems) or "no task was made")
    write_tasks(out, instances, [_lineage(each) for each in instances])
    named = sum(spec_of(each).taken_out > 0 for each in instances)
    return Made(len(instances), len({each.repo for each in instances}), named, tuple(problems))


def _small_changes(repository: GitRepository, package: Package) -> Iterator[_Commit]:
    """Commits, newest first, that change code in one to ``_MOST_FILES`` Python files."""
    try:
        head = repository.text("rev-parse", "--verify", f"{package.commit}^{{commit}}").strip()
    except ConfigError as error:
        raise ConfigError(f"{package.git} has no commit {package.commit}") from error
    log = repository.text(
        *("log", "--first-parent", "--no-merges", f"--max-count={_LOOKED_THROUGH}"),
        *("--format=%x00%H%x1f%P%x1f%cI%x1f%B%x1f", "--name-status", "--no-renames", head),
    )
    for entry in log.split("\0")[1:]:
        commit, parents, date, message, listed = (entry.split("\x1f", 4) + [""] * 4)[:5]
        code = tuple(
            path for status, path in _statuses(listed) if status == "M" and path.endswith(".py") and is_code(path)
        )
        if len(parents.split()) == 1 and 1 <= len(code) <= _MOST_FILES:
            yield _Commit(commit, parents, date, message, code)


def _statuses(listed: str) -> Iterator[tuple[str, str]]:
    for line in listed.splitlines():
        status, tab, path = line.partition("\t")
        if tab:
            yield status, path


def _task(repository: GitRepository, package: Package, commit: _Commit) -> Instance | str:
    """The task of a commit, or why it is none."""
    if not is_fix(commit.message):
        return "its message speaks of no fix"
    try:
        patch = repository.diff(commit.parent, commit.commit, commit.code)
    except UnicodeDecodeError:
        return "its change is no text"
    located = places_of_patch(repository, commit.parent, patch)
    if isinstance(located, str):
        return located
    if not 1 <= len(located.places.functions) <= _MOST_FUNCTIONS or located.whole_files:
        return f"it changes {len(located.places.functions)} functions"
    statement = statement_of(commit.message, located.places)
    if statement is None:
        return "its message says too little without the names"
    spec = LocalizationSpec(git=package.git or "", taken_out=statement.taken_out)
    return Instance(
        instance_id=f"localize__{package.name}-{commit.commit[:8]}",
        repo=f"git/{package.name}",
        base_commit=commit.parent,
        version=commit.commit[:8],
        created_at=commit.date,
        problem_statement=statement.text,
        patch=patch,
        extra={LOCALIZATION: spec.model_dump(mode="json")},
    )


def _split_by_time(newest_first: Sequence[Instance]) -> list[Instance]:
    held_out = max(1, round(HELD_OUT_SHARE * len(newest_first))) if len(newest_first) > 1 else 0
    return [
        each.model_copy(update={"extra": {**each.extra, "split": "heldout" if at < held_out else "train"}})
        for at, each in enumerate(newest_first)
    ]


def _lineage(instance: Instance) -> TaskLineage:
    source: JsonObject = {"git": spec_of(instance).git, "commit": instance.base_commit}
    return TaskLineage(instance_id=instance.instance_id, source=source, modifier=LOCALIZATION)
