"""What a candidate has to pass: gates over measurements of the held-out suite, which is frozen at first use."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from openhands_rl_plugin.apps.loop.run import LoopJob, open_player
from openhands_rl_plugin.apps.loop.tasks import LoopTasks, TaskSource, measured_tasks
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings
from openhands_rl_plugin.config.success import success_rule
from openhands_rl_plugin.contrib.watch.journal import HELD_OUT, Measurement
from openhands_rl_plugin.contrib.watch.settings import watch_settings
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.statistics import paired_difference
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.runs.suites import TESTS, own_suite
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.scoring import rescore, stored_rewards

_LEAST_MARGIN = 0.02
"""Smaller ones ask for as many tasks as this one."""


@dataclass(frozen=True)
class Verdict:
    """Whether a gate lets the candidate on, the sentence about it, and its figures."""

    passed: bool
    sentence: str
    figures: JsonObject


def tasks_needed(margin: float) -> int:
    """Tasks below which a loss of ``margin`` goes unseen too often: the interval of tied tasks has no width, however
    few they are. With n of them no loss is seen with a chance of ``(1 - margin) ** n``, here at most 0.14."""
    return math.ceil(2 / max(margin, _LEAST_MARGIN))


def held_out_gate(
    candidate: str, after: Mapping[str, float], against: Mapping[str, Mapping[str, float]], margin: float
) -> Verdict:
    """Passed unless the interval of a paired difference includes a loss of more than ``margin``.

    Args:
        candidate: its name, for the sentence.
        after: task -> share of the candidate's attempts that succeeded.
        against: name -> the same of what it is compared with. Beside the version in use that is the best one so far,
            so that losses within the margin do not add up from version to version.
        margin: of the mean success, in [0, 1).
    """
    sentences: list[str] = []
    figures: JsonObject = {}
    passed = True
    least = tasks_needed(margin)
    for name, before in against.items():
        shared = sorted(before.keys() & after.keys())
        change = paired_difference([before[task] for task in shared], [after[task] for task in shared])
        lost = [task for task in shared if after[task] < before[task]]
        passed = passed and change.low is not None and change.n >= least and change.low >= -margin
        of = f" of {least} that the margin needs" if change.n < least else ""
        found = (
            f"{change.mean:+.3f} in success against {name} (95% interval {change.low:+.3f} to {change.high:+.3f}, "
            if change.n
            else f"no task in common with {name} ("
        )
        sentences.append(f"{found}{change.n} tasks{of}, {len(lost)} done worse)")
        figures[name] = {"mean": change.mean, "low": change.low, "high": change.high, "n": change.n, "worse": [*lost]}
    allowed = f"a loss of {margin:g} is allowed"
    sentence = f"{candidate} {'passed' if passed else 'was held back by'} the held-out suite: {'; '.join(sentences)}"
    return Verdict(passed, f"{sentence}; {allowed}", {"gate": HELD_OUT, "comparisons": figures})


LEAST_MEASURED = 0.9
"""Share of the suite's tasks that must have a valid episode; else the model server or the sandbox was away."""
_CERTAIN = 1 - 1e-9


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


async def measure(
    job: LoopJob, storage: TrajectoryStorage, *, version: str, run_id: str, served_model: str
) -> Measurement:
    """Roll out every task of the suite with the model ``served_model``; the same ``run_id`` resumes.

    Raises ``InfrastructureError`` where too many episodes failed, and what an environment that is not there raises.
    """
    settings, software = job.settings, job.tasks.suite.software
    tasks = [each.task.model_copy(update={"limits": each.task.limits or job.limits}) for each in job.tasks.held_out]
    plan = RolloutPlan(
        run_id=run_id,
        tasks=tuple(tasks),
        samples_per_task=watch_settings(settings).attempts,
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
            executed = await roll_out(plan, runner, storage)
    reward = make_reward(job.settings.reward.overridden(TESTS) if software else RewardSettings(name="return"))
    await rescore(storage, reward, TrajectoryFilter(run_id=run_id))
    rule = success_rule(tasks[0].environment, job.settings.reward)
    success: dict[str, list[bool]] = defaultdict(list)
    for each, value in zip(executed, await stored_rewards(storage, reward, executed), strict=True):
        if value is not None:
            success[each.task.id].append(value >= _CERTAIN if software else rule.holds(value, each.stop))
    if len(success) < LEAST_MEASURED * len(tasks):
        why = next((f": {each.failure.message:.200}" for each in executed if each.failure is not None), "")
        raise InfrastructureError(f"only {len(success)} of {len(tasks)} held-out tasks have a valid episode{why}")
    means = {task: fmean(values) for task, values in success.items()}
    return Measurement(version=version, success=means, mean=fmean(means.values()))
