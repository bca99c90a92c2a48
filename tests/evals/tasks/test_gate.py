"""The quality gate, with a back end whose verdicts are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.evals.swe.instances import Instance, PatchVerdict, TestsStatus, VerdictKind
from openhands_rl_plugin.evals.tasks.make import NO_OP, check_tasks

Judge = Callable[[Instance, str, int], VerdictKind]


class KnownBackend:
    """Gives the verdicts of ``judge``, which hears the instance, the patch, and how often it was asked before."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._asked: dict[tuple[str, str], int] = {}

    async def check(self) -> None: ...

    async def checkout(self, instance: Instance, directory: Path) -> TaskWorkspace:
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
        "patch": f"patch of {name}",
        "fail_to_pass": (f"t.py::{name}",),
    }
    return Instance.model_validate({**row, **changes})


async def problems(*tasks: Instance, judge: Judge = good) -> dict[str, str]:
    found = await check_tasks(tasks, KnownBackend(judge), repeats=3)
    return {name: "; ".join(each) for name, each in found.items()}


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (lambda i, p, at: VerdictKind.UNRESOLVED, "its own patch resolves it in 0 of 3 runs"),
        (lambda i, p, at: VerdictKind.RESOLVED, "changing nothing gives resolved"),
        (lambda i, p, at: good(i, p, at) if at < 2 else VerdictKind.TIMED_OUT, "differently from run to run"),
        (lambda i, p, at: VerdictKind.INFRASTRUCTURE if p == NO_OP else good(i, p, at), "gives infrastructure"),
    ],
)
async def test_a_bad_task_is_named(judge: Judge, reason: str) -> None:
    assert reason in (await problems(instance("one"), judge=judge))["one"]


async def test_good_tasks_pass_and_one_with_the_fix_of_another_does_not() -> None:
    again = instance("two", patch=instance("one").patch)
    found = await problems(instance("one"), again, instance("three"))
    assert found == {"one": "", "two": "it is one once more", "three": ""}
