"""The origin and validation of tasks (``.lineage.json``), the quality gate, and their table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.table import Table

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import scratch_folder, write_file
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.runs.suites import own_suite_of
from openhands_rl_plugin.evals.swe.dataset import read_instances, row_of
from openhands_rl_plugin.evals.swe.types import Instance, InstanceBackend, PatchVerdict, VerdictKind
from openhands_rl_plugin.trajectories.view import table


class Check(Frozen, extra="ignore"):
    """The result of the quality gate. ``oracle`` and ``no_op``: how often the gold patch, and a patch without effect,
    resolved the task in ``repeats`` runs each.
    """

    repeats: int
    oracle: int
    no_op: int
    problems: tuple[str, ...] = ()


class TaskLineage(Frozen, extra="ignore"):
    """One task: its kind of bug, ``function`` and file where the bug is, and what the gate found."""

    instance_id: str
    modifier: str = ""
    path: str = ""
    function: str = ""
    check: Check | None = None


class TasksLineage(Frozen, extra="ignore"):
    """All tasks of a file, or none where its rows say what they are. ``checked``: they passed the gate."""

    checked: bool = False
    tasks: tuple[TaskLineage, ...] = ()


def lineage_path(tasks: Path) -> Path:
    """``tasks.jsonl`` -> ``tasks.lineage.json``."""
    return tasks.with_name(f"{tasks.stem}.lineage.json")


def read_lineage(tasks: Path) -> TasksLineage | None:
    """The lineage of a file of tasks; ``None`` when it has none. Raises ``ConfigError`` for one that is damaged."""
    path = lineage_path(tasks)
    try:
        return TasksLineage.model_validate_json(path.read_bytes()) if path.exists() else None
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} is no lineage: make it again: openhands-rl tasks check {tasks}") from error


def write_tasks(path: Path, instances: Sequence[Instance], tasks: Sequence[TaskLineage]) -> None:
    """Write the rows and their lineage, each atomically. Raises ``StorageError``."""
    rows = "".join(json.dumps(row_of(each), ensure_ascii=False) + "\n" for each in instances)
    write_file(path, rows, parents=True)
    _write_lineage(path, TasksLineage(tasks=tuple(tasks)))


def _write_lineage(tasks: Path, lineage: TasksLineage) -> None:
    write_file(lineage_path(tasks), lineage.model_dump_json(indent=1, exclude_none=True) + "\n")


NO_OP = """diff --git a/no_op.txt b/no_op.txt
new file mode 100644
--- /dev/null
+++ b/no_op.txt
@@ -0,0 +1 @@
+Nothing is changed.
"""
"""A patch that applies and has no effect: an empty patch would not run the tests."""

type OnProgress = Callable[[int, int, str], None]
"""Tasks done, tasks in all, the id of the last one."""


async def check_tasks(
    path: Path,
    backend: InstanceBackend,
    *,
    repeats: int = 2,
    workers: int = 2,
    timeout: float = 600.0,
    on_progress: OnProgress | None = None,
) -> TasksLineage:
    """Run the quality gate on every task of a file, and write its lineage again with what was found.

    ``timeout`` is in seconds for one run of the tests. Raises ``ConfigError``, and ``InfrastructureError`` without a
    usable back end.
    """
    instances = read_instances(path)
    await backend.check()
    known = {task.instance_id: task for task in (read_lineage(path) or TasksLineage()).tasks}
    same = duplicates(instances, known)
    turns, done = asyncio.Semaphore(workers), 0

    async def checked(instance: Instance) -> TaskLineage:
        nonlocal done
        with scratch_folder("check") as folder:

            async def grade(patch: str, name: str) -> list[PatchVerdict]:
                places = [folder / f"{name}-{at}" / instance.instance_id for at in range(repeats)]
                return [await backend.grade(instance, patch, logs=each, timeout=timeout) for each in places]

            async with turns:
                check = _check(await grade(instance.patch, "oracle"), await grade(NO_OP, "no-op"), same, instance)
        done += 1
        if on_progress is not None:
            on_progress(done, len(instances), instance.instance_id)
        found = TaskLineage(instance_id=instance.instance_id)
        return known.get(instance.instance_id, found).model_copy(update={"check": check})

    tasks = await asyncio.gather(*map(checked, instances))
    passed = not any(task.check is None or task.check.problems for task in tasks)
    lineage = TasksLineage(checked=passed, tasks=tuple(tasks))
    _write_lineage(path, lineage)
    return lineage


def _check(oracle: list[PatchVerdict], no_op: list[PatchVerdict], same: Mapping[str, str], instance: Instance) -> Check:
    solved, idle = sum(each.resolved for each in oracle), sum(each.resolved for each in no_op)
    runs = [{(each.kind, each.fail_to_pass, each.pass_to_pass) for each in verdicts} for verdicts in (oracle, no_op)]
    other = same.get(instance.instance_id, "")
    problems: list[str] = []
    if solved < len(oracle):
        problems.append(f"its own patch resolves it in {solved} of {len(oracle)} runs{_why(oracle)}")
    if idle or any(each.kind is not VerdictKind.UNRESOLVED for each in no_op):
        problems.append(f"changing nothing gives {', '.join(sorted({each.kind for each in no_op}))}{_why(no_op)}")
    if any(len(ends) > 1 for ends in runs):
        problems.append("its tests come out differently from run to run")
    if other:
        problems.append(f"it is {other} once more")
    return Check(repeats=len(oracle), oracle=solved, no_op=idle, problems=tuple(problems))


def _why(verdicts: Sequence[PatchVerdict]) -> str:
    reason = next((each.reason for each in verdicts if each.reason), "")
    return f" ({reason})" if reason else ""


def duplicates(instances: Sequence[Instance], lineage: Mapping[str, TaskLineage]) -> dict[str, str]:
    """Task -> the earlier one of its repository with the same fix, failing tests, statement, or function with a bug.

    Rows of another package's suite are the same when their fixes are.
    """
    found: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for instance in instances:
        known, name = lineage.get(instance.instance_id), instance.instance_id
        marks: list[object] = [("fix", instance.patch)]
        if own_suite_of(instance) is None:
            marks += [("statement", instance.problem_statement)]
            marks += [("tests", *sorted(instance.fail_to_pass))] if instance.fail_to_pass else []
            marks += [("function", known.path, known.function)] if known and known.function else []
        earlier = [first.setdefault((instance.repo, mark), name) for mark in marks]
        if other := next((each for each in earlier if each != name), None):
            found[name] = other
    return found


def table_of(instances: Sequence[Instance], lineage: TasksLineage | None) -> Table:
    """One line a task: what fails, how the bug was made, and whether the gate let it pass."""
    lineage = lineage or TasksLineage()
    known = {task.instance_id: task for task in lineage.tasks}
    rows: list[tuple[str, ...]] = []
    for each in instances:
        own, task = own_suite_of(each), known.get(each.instance_id, TaskLineage(instance_id=each.instance_id))
        spec = each.extra.get(own.column) if own is not None else None
        kind = str(spec.get("kind", "")) if isinstance(spec, dict) else task.modifier
        gate = "yes" if task.check or lineage.checked else "no"
        counts = (str(len(each.fail_to_pass)), str(len(each.pass_to_pass)))
        problem = task.check.problems[0] if task.check and task.check.problems else gate
        rows.append((each.instance_id, str(each.extra.get("split") or ""), kind, *counts, problem))
    numbers = ("fail", "pass")
    return table(("task", "split", "made by", *numbers, "checked"), rows, numbers=numbers)
