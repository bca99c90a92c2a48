"""The results of a run: each evaluation with its interval, and the effect of each training stage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from openhands_rl_plugin.core.statistics import Estimate, paired_difference, wilson
from openhands_rl_plugin.core.types import Frozen, Trajectory
from openhands_rl_plugin.training.loop.plan import LoopState

SUCCESS = 0.999


class StageEvaluation(Frozen):
    """Held-out results after one stage; ``turns`` is a mean over episodes."""

    stage: str
    success: Estimate
    reward: float
    turns: float
    seconds: float


def evaluations(state: LoopState) -> tuple[StageEvaluation, ...]:
    """The evaluations of a run in order. ``success.n`` excludes failed and unscored episodes."""
    return tuple(
        StageEvaluation(
            stage=record.name,
            success=wilson(
                int(record.metrics["successes"]),
                int(record.metrics["episodes"] - record.metrics["failed"] - record.metrics.get("unscored", 0.0)),
            ),
            reward=record.metrics.get("reward", math.nan),
            turns=record.metrics["turns"],
            seconds=record.finished - record.started,
        )
        for record in state.records
        if record.name.startswith("evaluate-")
    )


COLUMNS = ("stage", "success", "95% interval", "mean reward", "turns")


def evaluation_rows(state: LoopState) -> list[tuple[str, ...]]:
    """The evaluations as text: a cell for each of ``COLUMNS``, and the number of tasks."""
    return [
        (
            one.stage.removeprefix("evaluate-"),
            f"{one.success.mean:.3f}" if one.success.n else "-",
            f"{one.success.low:.3f} to {one.success.high:.3f}" if one.success.n else "-",
            f"{one.reward:.3f}" if one.success.n else "-",
            f"{one.turns:.1f}",
            str(one.success.n),
        )
        for one in evaluations(state)
    ]


def success_difference(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Estimate:
    """Paired difference of the success rates over the tasks with a valid episode in both evaluations."""
    first = {trajectory.task.id: float(trajectory.episode_return >= SUCCESS) for trajectory in before}
    later = {trajectory.task.id: float(trajectory.episode_return >= SUCCESS) for trajectory in after}
    shared = sorted(first.keys() & later.keys())
    return paired_difference([first[task] for task in shared], [later[task] for task in shared])


def comparison_sentence(name: str, difference: Estimate, tasks: str = "goals") -> str:
    """``RL over SFT: +0.21 (95% interval +0.10 to +0.32, 100 goals)``."""
    return (
        f"{name}: {difference.mean:+.2f} in success (95% interval {difference.low:+.2f} to {difference.high:+.2f}, "
        f"{difference.n} {tasks} in both evaluations)"
    )
