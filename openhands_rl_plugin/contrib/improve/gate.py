"""The quality gate task by task, so that a killed run checks none of them twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.lineage import TaskLineage, write_tasks
from openhands_rl_plugin.evals.tasks.quality_gate import OnProgress, QualityGate, check_tasks, duplicates


class CheckedTask(Frozen):
    """A task that went through the gate; ``seconds``: of one run of its tests there, with its checkout."""

    lineage: TaskLineage
    seconds: float

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it is no good task; empty for a good one."""
        return self.lineage.check.problems if self.lineage.check is not None else ("it was not checked",)


async def gate_tasks(
    instances: Sequence[Instance],
    lineage: Sequence[TaskLineage],
    backend: InstanceBackend,
    gate: QualityGate,
    folder: Path,
    on_progress: OnProgress,
) -> dict[str, CheckedTask]:
    """Task -> its check, by id. What ``folder`` has from an earlier run is not done again.

    Raises as ``check_tasks`` does.
    """
    known, turns, done = {task.instance_id: task for task in lineage}, asyncio.Semaphore(gate.workers), 0
    same = duplicates(instances, known)

    async def checked(instance: Instance) -> CheckedTask:
        nonlocal done
        async with turns:
            found = _earlier(folder, instance) or await _checked(instance, known, backend, gate, folder)
        done += 1
        on_progress(done, len(instances), instance.instance_id)
        return _with_duplicate(found, same.get(instance.instance_id))

    results = await asyncio.gather(*map(checked, instances))
    return {each.lineage.instance_id: each for each in results}


def _file(folder: Path, instance: Instance) -> Path:
    return folder / f"{instance.instance_id}.checked.json"


def _earlier(folder: Path, instance: Instance) -> CheckedTask | None:
    try:
        return CheckedTask.model_validate_json(_file(folder, instance).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_file(folder, instance)} cannot be read: delete it, and the task is checked again"
        ) from error


async def _checked(
    instance: Instance,
    lineage: dict[str, TaskLineage],
    backend: InstanceBackend,
    gate: QualityGate,
    folder: Path,
) -> CheckedTask:
    """One task as a file of its own, which is what the gate takes."""
    rows = folder / f"{instance.instance_id}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(rows, [instance], [lineage[instance.instance_id]])
    began = time.monotonic()
    (task,) = (await check_tasks(rows, backend, gate)).tasks
    found = CheckedTask(lineage=task, seconds=round((time.monotonic() - began) / (2 * gate.repeats), 2))
    write_file(_file(folder, instance), found.model_dump_json(indent=1))
    return found


def _with_duplicate(found: CheckedTask, other: str | None) -> CheckedTask:
    check = found.lineage.check
    if other is None or check is None:
        return found
    check = check.model_copy(update={"duplicate_of": other, "problems": (*check.problems, f"it is {other} once more")})
    return found.model_copy(update={"lineage": found.lineage.model_copy(update={"check": check})})
