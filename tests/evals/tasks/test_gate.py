"""The quality gate, with a back end whose verdicts are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.types import Checkout, Instance, PatchVerdict, TestsStatus, VerdictKind
from openhands_rl_plugin.evals.tasks.gate import (
    NO_OP,
    TaskLineage,
    TasksLineage,
    check_tasks,
    lineage_path,
    read_lineage,
    write_tasks,
)

Judge = Callable[[Instance, str, int], VerdictKind]


class KnownBackend:
    """Gives the verdicts of ``judge``, which hears the instance, the patch, and how often it was asked before."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._asked: dict[tuple[str, str], int] = {}

    async def check(self) -> None: ...

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        raise NotImplementedError

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        at = self._asked.get((instance.instance_id, patch), 0)
        self._asked[instance.instance_id, patch] = at + 1
        kind = self._judge(instance, patch, at)
        failed = () if kind is VerdictKind.RESOLVED else instance.fail_to_pass
        return PatchVerdict(instance_id=instance.instance_id, kind=kind, fail_to_pass=TestsStatus(failure=failed))


def good(instance: Instance, patch: str, at: int) -> VerdictKind:
    return VerdictKind.RESOLVED if patch == instance.patch else VerdictKind.UNRESOLVED


def instance(name: str, **changes: str | tuple[str, ...]) -> Instance:
    row = {
        "instance_id": name,
        "repo": "sdist/a",
        "base_commit": "1" * 40,
        "problem_statement": f"{name} is wrong: " + " ".join(f"{name}{at}" for at in range(30)),
        "patch": f"patch of {name}",
        "fail_to_pass": (f"t.py::{name}",),
    }
    return Instance.model_validate({**row, **changes})


def written(path: Path, *instances: Instance) -> Path:
    known = [TaskLineage(instance_id=each.instance_id, path="a.py", function=each.instance_id) for each in instances]
    write_tasks(path, instances, known)
    return path


async def problems(path: Path, judge: Judge = good) -> dict[str, str]:
    lineage = await check_tasks(path, KnownBackend(judge), repeats=3)
    assert lineage.checked == (not any(task.check and task.check.problems for task in lineage.tasks))
    return {
        task.instance_id: "; ".join(task.check.problems if task.check else ("unchecked",)) for task in lineage.tasks
    }


async def test_good_tasks_pass_and_are_remembered(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", instance("one"), instance("two"))
    assert await problems(path) == {"one": "", "two": ""}
    assert (read_lineage(path) or TasksLineage()).checked
    lineage_path(path).write_text("[]")
    with pytest.raises(ConfigError, match="openhands-rl tasks check"):
        read_lineage(path)


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (lambda i, p, at: VerdictKind.UNRESOLVED, "its own patch resolves it in 0 of 3 runs"),
        (lambda i, p, at: VerdictKind.RESOLVED, "changing nothing gives resolved"),
        (lambda i, p, at: good(i, p, at) if at < 2 else VerdictKind.TIMED_OUT, "differently from run to run"),
        (lambda i, p, at: VerdictKind.INFRASTRUCTURE if p == NO_OP else good(i, p, at), "gives infrastructure"),
    ],
)
async def test_a_bad_task_is_named(judge: Judge, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", instance("one"))
    assert reason in (await problems(path, judge))["one"]


@pytest.mark.parametrize("same", ["patch", "fail_to_pass", "problem_statement"])
async def test_duplicates_are_named(same: str, tmp_path: Path) -> None:
    again = instance("two", **{same: getattr(instance("one"), same)})
    path = written(tmp_path / "t.jsonl", instance("one"), again, instance("three"))
    assert await problems(path) == {"one": "", "two": "it is one once more", "three": ""}
