"""The results of a run: each evaluation with its interval."""

from __future__ import annotations

import math

from openhands_rl_plugin.core.statistics import Estimate, wilson
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.training.loop.facts import evaluations as measured
from openhands_rl_plugin.training.loop.facts import success_of
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
            success=success_of(record) or wilson(0, 0),
            reward=record.metrics.get("reward", math.nan),
            turns=record.metrics["turns"],
            seconds=record.finished - record.started,
        )
        for record in measured(state)
    )


COLUMNS = ("stage", "success", "95% interval", "mean reward", "turns")


def evaluation_rows(state: LoopState) -> list[tuple[str, ...]]:
    """The evaluations as text: a cell for each of ``COLUMNS``, and the number of tasks."""
    return [
        (
            one.stage,
            f"{one.success.mean:.3f}" if one.success.n else "-",
            f"{one.success.low:.3f} to {one.success.high:.3f}" if one.success.n else "-",
            f"{one.reward:.3f}" if one.success.n else "-",
            f"{one.turns:.1f}",
            str(one.success.n),
        )
        for one in evaluations(state)
    ]
