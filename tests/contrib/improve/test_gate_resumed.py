"""A task that was checked is not checked again, whenever the run was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from openhands_rl_plugin.contrib.improve.gym import gate_tasks
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.evals.swe.types import Checkout, Instance, PatchVerdict, TestsStatus, VerdictKind
from openhands_rl_plugin.evals.tasks.gate import NO_OP, QualityGate, TaskLineage


class EndingBackend:
    """Resolves what is no no-op, and ends after so many patches, as a killed process does."""

    name = "ending"

    def __init__(self, after: int) -> None:
        self.graded: list[str] = []
        self._after = after

    async def check(self) -> None:
        return None

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        return Checkout(directory=directory)

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        if len(self.graded) == self._after:
            raise InfrastructureError("killed")
        self.graded.append(instance.instance_id)
        kind = VerdictKind.UNRESOLVED if patch == NO_OP else VerdictKind.RESOLVED
        failed = () if kind is VerdictKind.RESOLVED else instance.fail_to_pass
        return PatchVerdict(instance_id=instance.instance_id, kind=kind, fail_to_pass=TestsStatus(failure=failed))

    async def close(self) -> None:
        return None


TASKS = [
    Instance(
        instance_id=f"task-{at}",
        repo="git/gym",
        base_commit=f"{at}" * 40,
        problem_statement=" ".join(f"w{at}x{word}" for word in range(9)),
        patch=f"patch {at if at < 3 else 0}",
        fail_to_pass=(f"test_{at}.py::fails",),
    )
    for at in range(4)
]
LINEAGE = [TaskLineage(instance_id=each.instance_id, source={}) for each in TASKS]


@pytest.mark.parametrize("after", range(8))
async def test_a_killed_gate_goes_on(after: int, tmp_path: Path) -> None:
    gate, killed, later = QualityGate(repeats=1, workers=1), EndingBackend(after), EndingBackend(99)
    with pytest.raises(InfrastructureError):
        await gate_tasks(TASKS, LINEAGE, killed, gate, tmp_path, lambda *_: None)
    told: list[int] = []
    found = await gate_tasks(TASKS, LINEAGE, later, gate, tmp_path, lambda done, *_: told.append(done))
    assert later.graded == [each.instance_id for each in TASKS[after // 2 :] for _ in range(2)]
    assert told == [1, 2, 3, 4]
    assert [name for name, each in found.items() if each.problems] == ["task-3"], "it is task-0 once more"


async def test_a_damaged_check_is_named(tmp_path: Path) -> None:
    (tmp_path / "task-0.checked.json").write_text("{")
    with pytest.raises(ConfigError, match=r"task-0.checked.json cannot be read: delete it"):
        await gate_tasks(TASKS, LINEAGE, EndingBackend(9), QualityGate(workers=1), tmp_path, lambda *_: None)
