"""The origin and validation of tasks (``.lineage.json``), the quality gate, and their table."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError
from rich.table import Table
from rich.text import Text

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import file_sha256, scratch_folder, write_file
from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.evals.runs.suites import own_suite_of
from openhands_rl_plugin.evals.swe.dataset import read_instances, row_of
from openhands_rl_plugin.evals.swe.types import Instance, InstanceBackend, PatchVerdict, VerdictKind

SCHEMA_VERSION = 1


class Validation(Frozen):
    """The runs that a task was accepted on: how often the tests ran without the bug and with it, how many tests there
    are, and how many of them fail with the bug.
    """

    runs_without_bug: int
    runs_with_bug: int
    tests: int
    failing: int


class Check(Frozen):
    """The result of the quality gate. ``oracle`` and ``no_op``: how often the gold patch, and a patch without effect,
    resolved the task in ``repeats`` runs each.
    """

    repeats: int
    oracle: int
    no_op: int
    same_outcomes: bool
    duplicate_of: str = ""
    pass_rate: float | None = None
    problems: tuple[str, ...] = ()


class TaskLineage(Frozen):
    """One task. ``source`` as in its row; ``function`` is where the bug is, ``path`` in which file."""

    instance_id: str
    source: JsonObject
    modifier: str = ""
    seed: int | None = None
    path: str = ""
    function: str = ""
    validation: Validation | None = None
    check: Check | None = None


class TasksLineage(Frozen):
    """All tasks of a file, or none where its rows say what they are. ``sha256`` is that of the file; ``checked``: it
    passed the gate, with ``backend``.
    """

    schema_version: int = SCHEMA_VERSION
    sha256: str
    checked: bool = False
    backend: str = ""
    pass_rate_window: tuple[float, float] | None = None
    tasks: tuple[TaskLineage, ...] = Field(default=())


def lineage_path(tasks: Path) -> Path:
    """``tasks.jsonl`` -> ``tasks.lineage.json``."""
    return tasks.with_name(f"{tasks.stem}.lineage.json")


def read_lineage(tasks: Path) -> TasksLineage | None:
    """The lineage of a file of tasks; ``None`` when it has none. Raises ``ConfigError`` for one that is damaged."""
    path = lineage_path(tasks)
    try:
        return TasksLineage.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        again = f"make it again: openhands-rl tasks check {tasks}"
        raise ConfigError(f"{path} cannot be read as a lineage; {again}") from error


def require_checked(path: Path) -> tuple[Instance, ...]:
    """The tasks of a file that passed the quality gate. Raises ``ConfigError`` when it did not, or changed since."""
    instances, lineage = read_instances(path), read_lineage(path)
    again = f"run: openhands-rl tasks check {path}"
    if lineage is None:
        raise ConfigError(f"{path} was never checked; {again}")
    if lineage.sha256 != file_sha256(path):
        raise ConfigError(f"{path} has changed since its lineage was written; {again}")
    if not lineage.checked:
        bad = sum(bool(task.check is None or task.check.problems) for task in lineage.tasks)
        raise ConfigError(f"{path} did not pass the quality gate ({bad} of {len(instances)} tasks); {again}")
    return instances


def write_tasks(path: Path, instances: Sequence[Instance], tasks: Sequence[TaskLineage]) -> None:
    """Write the rows and their lineage, each atomically. Raises ``StorageError``."""
    rows = "".join(json.dumps(row_of(each), ensure_ascii=False) + "\n" for each in instances)
    write_file(path, rows, parents=True)
    write_lineage(path, TasksLineage(sha256=file_sha256(path), tasks=tuple(tasks)))


def write_lineage(tasks: Path, lineage: TasksLineage) -> None:
    """Write the lineage of a file of tasks."""
    write_file(lineage_path(tasks), lineage.model_dump_json(indent=1, exclude_none=True) + "\n")


NO_OP = """diff --git a/no_op.txt b/no_op.txt
new file mode 100644
--- /dev/null
+++ b/no_op.txt
@@ -0,0 +1 @@
+Nothing is changed.
"""
"""A patch that applies and has no effect: an empty patch would not run the tests."""

SAME_STATEMENT = 0.9
"""Statements with at least this Jaccard index of their five-word shingles are duplicates."""
_RUN = 5

type OnProgress = Callable[[int, int, str], None]
"""Tasks done, tasks in all, the id of the last one."""


class QualityGate(Frozen):
    """How strict the gate is. ``timeout`` is in seconds for one run; ``low`` and ``high`` bound the pass rate."""

    repeats: int = 2
    workers: int = 2
    timeout: float = 600.0
    low: float = 0.01
    high: float = 0.99


async def check_tasks(
    path: Path,
    backend: InstanceBackend,
    gate: QualityGate,
    *,
    results: Path | None = None,
    on_progress: OnProgress | None = None,
) -> TasksLineage:
    """Run the oracle and the no-op agent on every task, and write the results into the file's lineage.

    ``results``: JSON, task -> share of a policy's attempts that solved it; a task outside the window does not pass.
    Raises ``ConfigError`` when the back end, the file or the results cannot be used.
    """
    await backend.check()
    instances, old = read_instances(path), read_lineage(path)
    rates = read_pass_rates(results, instances) if results is not None else {}
    known = {task.instance_id: task for task in old.tasks} if old is not None else {}
    same = duplicates(instances, known)
    turns, done = asyncio.Semaphore(gate.workers), 0

    async def checked(instance: Instance) -> TaskLineage:
        nonlocal done
        async with turns:
            oracle, no_op = await _runs(instance, backend, gate)
        done += 1
        if on_progress is not None:
            on_progress(done, len(instances), instance.instance_id)
        check = _check(instance, gate, oracle, no_op, same.get(instance.instance_id, ""), rates)
        task = known.get(instance.instance_id) or _unknown(instance)
        return task.model_copy(update={"check": check})

    tasks = await asyncio.gather(*map(checked, instances))
    lineage = TasksLineage(
        sha256=file_sha256(path),
        checked=not any(task.check is None or task.check.problems for task in tasks),
        backend=backend.name,
        pass_rate_window=(gate.low, gate.high) if results is not None else None,
        tasks=tuple(tasks),
    )
    write_lineage(path, lineage)
    return lineage


def read_pass_rates(path: Path, instances: Sequence[Instance]) -> dict[str, float]:
    """Task -> share of attempts that solved it. Raises ``ConfigError`` for an invalid file or a missing task."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict) or not all(
        isinstance(rate, int | float) and 0 <= rate <= 1 for rate in found.values()
    ):
        raise ConfigError(f"{path}: must be one JSON object, task -> share of attempts that solved it (0 to 1)")
    if missing := [each.instance_id for each in instances if each.instance_id not in found]:
        raise ConfigError(
            f"{path}: no result for {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        )
    return {str(name): float(rate) for name, rate in found.items()}


async def _runs(
    instance: Instance, backend: InstanceBackend, gate: QualityGate
) -> tuple[list[PatchVerdict], list[PatchVerdict]]:
    with scratch_folder("check") as folder:

        async def grade(patch: str, name: str) -> list[PatchVerdict]:
            places = [folder / f"{name}-{at}" / instance.instance_id for at in range(gate.repeats)]
            return [await backend.grade(instance, patch, logs=each, timeout=gate.timeout) for each in places]

        return await grade(instance.patch, "oracle"), await grade(NO_OP, "no-op")


def _check(
    instance: Instance,
    gate: QualityGate,
    oracle: Sequence[PatchVerdict],
    no_op: Sequence[PatchVerdict],
    duplicate_of: str,
    rates: Mapping[str, float],
) -> Check:
    solved, idle = sum(each.resolved for each in oracle), sum(each.resolved for each in no_op)
    same = all(len({_outcome(each) for each in runs}) == 1 for runs in (oracle, no_op))
    rate = rates.get(instance.instance_id)
    problems: list[str] = []
    if solved < len(oracle):
        problems.append(f"its own patch resolves it in {solved} of {len(oracle)} runs{_why(oracle)}")
    if idle or any(each.kind is not VerdictKind.UNRESOLVED for each in no_op):
        problems.append(f"changing nothing gives {', '.join(sorted({each.kind for each in no_op}))}{_why(no_op)}")
    if not same:
        problems.append("its tests come out differently from run to run")
    if duplicate_of:
        problems.append(f"it is {duplicate_of} once more")
    if rate is not None and not gate.low <= rate <= gate.high:
        problems.append(f"the policy solves it in {rate:.0%} of its attempts: nothing to learn from")
    return Check(
        repeats=gate.repeats,
        oracle=solved,
        no_op=idle,
        same_outcomes=same,
        duplicate_of=duplicate_of,
        pass_rate=rate,
        problems=tuple(problems),
    )


def _outcome(verdict: PatchVerdict) -> tuple[VerdictKind, frozenset[str], frozenset[str]]:
    return verdict.kind, frozenset(verdict.fail_to_pass.failure), frozenset(verdict.pass_to_pass.failure)


def _why(verdicts: Sequence[PatchVerdict]) -> str:
    reason = next((each.reason for each in verdicts if each.reason), "")
    return f" ({reason})" if reason else ""


def _unknown(instance: Instance) -> TaskLineage:
    source = instance.extra.get("source")
    return TaskLineage(instance_id=instance.instance_id, source=source if isinstance(source, dict) else {})


def duplicates(instances: Sequence[Instance], lineage: Mapping[str, TaskLineage]) -> dict[str, str]:
    """Task -> the earlier one that it duplicates: same function, same failing tests, or almost the same statement.

    Rows of another package's suite are the same when their fixes are.
    """
    found: dict[str, str] = {}
    by_repo: dict[str, list[tuple[Instance, frozenset[str]]]] = {}
    for instance in instances:
        words = _shingles(instance.problem_statement)
        earlier = by_repo.setdefault(instance.repo, [])
        for other, their_words in earlier:
            alike = _same_task(instance, other, lineage) or _overlap(words, their_words) >= SAME_STATEMENT
            # The rows of such a suite have one form of statement, and a function may have several bugs.
            if instance.patch == other.patch or (alike and own_suite_of(instance) is None):
                found[instance.instance_id] = other.instance_id
                break
        earlier.append((instance, words))
    return found


def _same_task(one: Instance, other: Instance, lineage: Mapping[str, TaskLineage]) -> bool:
    if one.patch == other.patch:
        return True
    if one.fail_to_pass and set(one.fail_to_pass) == set(other.fail_to_pass):
        return True
    mine, theirs = lineage.get(one.instance_id), lineage.get(other.instance_id)
    if mine is None or theirs is None or not mine.function:
        return False
    return (mine.source, mine.path, mine.function) == (theirs.source, theirs.path, theirs.function)


def _shingles(text: str) -> frozenset[str]:
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return frozenset(" ".join(words[at : at + _RUN]) for at in range(max(1, len(words) - _RUN + 1)))


def _overlap(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / max(1, len(one | other))


def table_of(instances: Sequence[Instance], lineage: TasksLineage | None) -> Table:
    """One line a task: what fails, how the bug was made, and whether the gate let it pass."""
    gated = lineage is not None and lineage.checked
    known = {task.instance_id: task for task in lineage.tasks} if lineage is not None else {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("task", "split", "made by", "fail", "pass", "checked", "report"):
        # On a narrow terminal the long ones give way: rich narrows columns that may wrap first, and no cell wraps.
        table.add_column(
            name, no_wrap=name not in ("task", "report"), justify="right" if name in ("fail", "pass") else "left"
        )
    for each in instances:
        task = known.get(each.instance_id)
        check = task.check if task is not None else None
        cells = (
            each.instance_id,
            str(each.extra.get("split", "")),
            task.modifier if task is not None else _kind(each),
            str(len(each.fail_to_pass)),
            str(len(each.pass_to_pass)),
            check.problems[0] if check and check.problems else "yes" if check or gated else "no",
            each.problem_statement.partition("\n")[0],
        )
        table.add_row(*(Text(visible(redact_text(cell)), no_wrap=True, overflow="ellipsis") for cell in cells))
    return table


def _kind(instance: Instance) -> str:
    """Of a row of another package's suite the kind of its bug."""
    own = own_suite_of(instance)
    spec = instance.extra.get(own.column) if own is not None else None
    return str(spec.get("kind", "")) if isinstance(spec, dict) else ""
