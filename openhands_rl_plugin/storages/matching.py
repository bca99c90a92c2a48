"""What a ``TrajectoryFilter`` means, for storages that have no query language of their own."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import to_json

from openhands_rl_plugin.records import TrajectoryFilter
from openhands_rl_plugin.types import Score, Trajectory


def matches(where: TrajectoryFilter, trajectory: Trajectory, scores: Sequence[Score]) -> bool:
    """Whether every field that is set agrees. ``scores`` are the trajectory's own, oldest first.

    ``since`` and ``until`` bound the time at which the episode finished. A newest score without a reward is unknown,
    so no bounds on the reward hold for it.
    """
    equal = (
        (where.run_id, trajectory.run_id),
        (where.group_id, trajectory.group_id),
        (where.task_id, trajectory.task.id),
        (where.environment, trajectory.task.environment),
        (where.split, trajectory.task.split),
        (where.strategy, trajectory.strategy.name),
        (where.policy_version, trajectory.policy.version),
        (where.stop, trajectory.stop),
        (where.failed, trajectory.failure is not None),
    )
    return (
        all(wanted is None or wanted == actual for wanted, actual in equal)
        and (where.ids is None or trajectory.id in where.ids)
        and _within(trajectory.times.finished, where.since, where.until)
        and _within(_reward(trajectory, scores), where.reward_at_least, where.reward_at_most)
    )


def may_match(where: TrajectoryFilter, document: bytes) -> bool:
    """False only when the JSON of a trajectory, as ``model_dump_json`` writes it, cannot match; spares the parsing."""
    named = {"run_id": where.run_id, "group_id": where.group_id, "environment": where.environment, "id": where.task_id}
    pairs = (b'"%s":%s' % (key.encode(), to_json(value)) for key, value in named.items() if value is not None)
    return all(pair in document for pair in pairs)


def _reward(trajectory: Trajectory, scores: Sequence[Score]) -> float | None:
    return scores[-1].reward if scores else trajectory.episode_return


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)
