"""The held-out suite: frozen at first use, played by a version once, and resumed by the store after a kill."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.apps.loop.run import LoopJob, open_player
from openhands_rl_plugin.apps.loop.tasks import LoopTasks, TaskSource, measured_tasks
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings
from openhands_rl_plugin.config.success import success_rule
from openhands_rl_plugin.contrib.watch.settings import watch_settings
from openhands_rl_plugin.contrib.watch.trouble import by_task
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import JsonObject, Task, Trajectory
from openhands_rl_plugin.evals.runs.own_suites import own_suite
from openhands_rl_plugin.evals.runs.suites import graded_by
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.rescoring import rescore, stored_rewards

LEAST_MEASURED = 0.9
"""Share of the suite's tasks that must have a valid episode; else the model server or the sandbox was away."""
_CERTAIN = 1 - 1e-9


class Unmeasured(InfrastructureError):
    """Too many episodes of an evaluation failed for it to say anything about the version."""


@dataclass(frozen=True)
class SuiteResult:
    """``success``: task -> share of its attempts that succeeded. ``figures``: counts over all attempts, and what
    went wrong in them."""

    success: dict[str, float]
    figures: JsonObject


def suite_tasks(settings: RLSettings) -> LoopTasks:
    """The tasks of ``[rl.watch]``. Raises ``ConfigError``."""
    watch = watch_settings(settings)
    if not watch.suite:
        raise ConfigError(
            '[rl.watch] suite: there is nothing to measure candidates on: name a suite, such as "environment" or '
            '"swe-local", or a file of rows with what the agent could do before'
        )
    rows = Path(watch.rows).expanduser() if watch.rows else None
    source = TaskSource(suite=watch.suite, rows=rows, count=None if rows else watch.tasks)
    tasks = measured_tasks(source, settings, watch.tasks)
    if not tasks.held_out:
        raise ConfigError(f"[rl.watch] suite: {watch.suite} has no tasks")
    return tasks


def digest_of(tasks: LoopTasks) -> str:
    """Identifies the tasks, with all that they ask; others would make two measurements incomparable."""
    parts = [entry.task.model_dump_json() for entry in tasks.held_out]
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


async def play_suite(
    job: LoopJob, storage: TrajectoryStorage, *, run_id: str, served_model: str, attempts: int
) -> SuiteResult:
    """Play every task ``attempts`` times with the model ``served_model``; the same ``run_id`` resumes.

    Raises ``Unmeasured`` where too many episodes failed, and what an environment that is not there raises.
    """
    tasks = job.tasks
    held_out = [entry.task for entry in tasks.held_out]
    played = await play(job, storage, held_out, run_id=run_id, served_model=served_model, attempts=attempts)
    graded = graded_by(tasks.entries, job.settings.reward) if tasks.suite.software else RewardSettings(name="return")
    reward = make_reward(graded)
    await rescore(storage, reward, TrajectoryFilter(run_id=run_id))
    rewards = await stored_rewards(storage, reward, played)
    result = _counted(played, rewards, _rule(job), len(held_out))
    stored = [each async for each, _ in storage.find(TrajectoryFilter(ids=tuple(t.id for t in played), failed=False))]
    return SuiteResult(result.success, {**result.figures, "trouble": by_task(stored)})


async def play(
    job: LoopJob, storage: TrajectoryStorage, tasks: Sequence[Task], *, run_id: str, served_model: str, attempts: int
) -> tuple[Trajectory, ...]:
    """Play these tasks, as the suite of ``job`` is played; the same ``run_id`` resumes. Failed episodes are returned,
    too."""
    settings = job.settings
    plan = RolloutPlan(
        run_id=run_id,
        tasks=tuple(task.model_copy(update={"limits": task.limits or job.limits}) for task in tasks),
        samples_per_task=attempts,
        served_model=served_model,
        sampling=settings.sampling_params(),
        seed=settings.sampling.seed,
        concurrency=settings.max_workers,
    )
    with ExitStack() as opened:
        if (own := own_suite(job.tasks.suite.name)) is not None:
            settings = opened.enter_context(own.serving(settings))
        if job.backend is not None:
            await job.backend.check()
        async with open_player(job, settings, storage) as runner:
            return await roll_out(plan, runner, storage)


def tokens_of(played: Sequence[Trajectory]) -> int:
    """Tokens of prompts and answers together."""
    return sum(each.usage.prompt_tokens + each.usage.completion_tokens for each in played)


def _rule(job: LoopJob) -> Callable[[Trajectory, float], bool]:
    if job.tasks.suite.software:
        return lambda trajectory, reward: reward >= _CERTAIN
    rule = success_rule(job.tasks.held_out[0].task.environment, job.settings.reward)
    return lambda trajectory, reward: rule.holds(reward, trajectory.stop)


def _counted(
    played: Sequence[Trajectory],
    rewards: Sequence[float | None],
    succeeded: Callable[[Trajectory, float], bool],
    tasks: int,
) -> SuiteResult:
    found: dict[str, list[bool]] = defaultdict(list)
    for trajectory, reward in zip(played, rewards, strict=True):
        if reward is not None:
            found[trajectory.task.id].append(succeeded(trajectory, reward))
    failed = [each for each in played if each.failure is not None]
    if len(found) < LEAST_MEASURED * tasks:
        why = f": {failed[0].failure.message:.200}" if failed and failed[0].failure is not None else ""
        raise Unmeasured(f"only {len(found)} of {tasks} held-out tasks have a valid episode{why}")
    success = {task: sum(each) / len(each) for task, each in found.items()}
    figures: JsonObject = {
        "episodes": len(played),
        "failed": len(failed),
        "mean": sum(success.values()) / len(success),
        "tokens": tokens_of(played),
    }
    return SuiteResult(success, figures)
