"""Attempts at users' tasks to compare theirs with: the version in use plays some of them again, where that can be."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from openhands_rl_plugin.apps.loop.run import LoopJob
from openhands_rl_plugin.contrib.watch.measuring import play, tokens_of
from openhands_rl_plugin.contrib.watch.settings import watch_settings
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, sub_agent_of
from openhands_rl_plugin.core.types import JsonObject, Task
from openhands_rl_plugin.training.algorithms import algorithm_of


async def replayable(
    job: LoopJob, storage: TrajectoryStorage, ids: Sequence[str], known: Collection[str]
) -> tuple[Task, ...]:
    """The newest ``[rl.watch] replay_tasks`` tasks of these episodes that can be played again, and were not yet.

    Those are tasks of the environment of ``[rl]``, which makes the same one again; a user's workspace as it was before
    is not there any more. None where the algorithm compares nothing. Raises ``StorageError``.

    Args:
        job: what the held-out suite is played with.
        storage: where the episodes are.
        ids: of the judged episodes, oldest first.
        known: ids of the tasks that were replayed before.
    """
    settings, suite = job.settings, job.tasks.suite
    most = watch_settings(settings).replay_tasks
    if not most or suite.software or algorithm_of(settings.training).kind != "reinforcement":
        return ()
    environment = suite.environment(settings)
    found: dict[str, Task] = {}
    async for trajectory, _ in storage.find(TrajectoryFilter(ids=tuple(ids))):
        task = trajectory.task
        if task.environment == environment and task.id not in known and sub_agent_of(task) is None:
            found.pop(task.id, None)
            found[task.id] = task
    return tuple(list(found.values())[-most:])


async def replay(
    job: LoopJob, storage: TrajectoryStorage, tasks: Sequence[Task], *, run_id: str, served_model: str
) -> tuple[str, JsonObject]:
    """Play each of the tasks ``[rl.loop] samples_per_task`` times: a sentence about it, and the figures."""
    attempts = job.settings.loop.samples_per_task
    played = await play(job, storage, tasks, run_id=run_id, served_model=served_model, attempts=attempts)
    failed = [each.failure for each in played if each.failure is not None]
    why = f", {len(failed)} failed: {failed[0].message:.200}" if failed else ""
    figures: JsonObject = {
        "tasks": [task.id for task in tasks],
        "episodes": len(played),
        "failed": len(failed),
        "tokens": tokens_of(played),
    }
    return f"{len(tasks)} tasks were played {attempts} times again, to compare{why}", figures
