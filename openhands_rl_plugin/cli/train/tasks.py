"""``openhands-rl train --tasks FILE``: learn only from tasks that the quality gate let pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.records import TrajectoryFilter

if TYPE_CHECKING:
    from openhands_rl_plugin.core.protocols import TrajectoryStorage

HELP = "only episodes of these tasks (a .jsonl or swe-local), which must have passed: openhands-rl tasks check"


async def of_checked_tasks(storage: TrajectoryStorage, where: TrajectoryFilter, suite: str) -> TrajectoryFilter:
    """``where`` with the episodes of the tasks of ``suite`` only.

    Raises ``ConfigError`` when the gate did not let them pass, ``TrainingError`` when no episode is of one of them.
    """
    from openhands_rl_plugin.evals.tasks.lineage import require_checked
    from openhands_rl_plugin.evals.tasks.sources.packages import tasks_file

    known = {task.instance_id for task in require_checked(tasks_file(suite))}
    ids = tuple([summary.id async for summary in storage.summaries(where) if summary.task_id in known])
    if not ids:
        raise TrainingError(f"no stored episode is of a task of {suite}: roll out on it first (openhands-rl evaluate)")
    return where.model_copy(update={"ids": ids})
