"""The quality gate: every task can be solved, is not solved already, and is no duplicate."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import file_sha256
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.copies import scratch_folder
from openhands_rl_plugin.evals.runs.own_suites import own_suite_of
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
from openhands_rl_plugin.evals.swe.types import Instance, PatchVerdict, VerdictKind
from openhands_rl_plugin.evals.tasks.lineage import Check, TaskLineage, TasksLineage, read_lineage, write_lineage

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
    with scratch_folder("openhands-rl-check-") as folder:

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
