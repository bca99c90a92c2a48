"""Rewards from the environment's return."""

from __future__ import annotations

import math

from pydantic import Field

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.types import Frozen, Score, Trajectory

# Sums of step rewards, such as 10 x 0.1, must not miss a threshold by a rounding error.
_ROUNDING = 1e-9


class ReturnOptions(Frozen):
    """No options."""


class ReturnReward:
    """The environment's return: the undiscounted sum of the step rewards on the acted path."""

    Options = ReturnOptions
    version = "return-1"

    def __init__(self, options: ReturnOptions | None = None) -> None:
        self.options = options or ReturnOptions()

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` when it has no valid return."""
        total, steps = environment_return(trajectory)
        return Score(trajectory_id=trajectory.id, reward=total, detail={"steps": steps}, reward_version=self.version)


class SuccessOptions(Frozen):
    """``threshold``: the least return of a success."""

    threshold: float = Field(default=1.0, allow_inf_nan=False)


class SuccessReward:
    """1.0 when the return reaches the threshold, else 0.0."""

    Options = SuccessOptions

    def __init__(self, options: SuccessOptions | None = None) -> None:
        self.options = options or SuccessOptions()

    @property
    def version(self) -> str:
        """The name of the reward with its threshold, because thresholds give different scores."""
        return f"success-1@{self.options.threshold:g}"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` when it has no valid return."""
        total, steps = environment_return(trajectory)
        return Score(
            trajectory_id=trajectory.id,
            reward=1.0 if total >= self.options.threshold - _ROUNDING else 0.0,
            detail={"return": total, "steps": steps},
            reward_version=self.version,
        )


class BonusOptions(Frozen):
    """``threshold``: the least return of a success; ``share`` in [0, 1]: the weight of success."""

    threshold: float = Field(default=1.0, allow_inf_nan=False)
    share: float = Field(default=0.5, ge=0, le=1)


class SuccessBonusReward:
    """``(1 - share) * return + share * success``: partial credit, with a bonus for success."""

    Options = BonusOptions

    def __init__(self, options: BonusOptions | None = None) -> None:
        self.options = options or BonusOptions()

    @property
    def version(self) -> str:
        """The name of the reward with its options, because they change the scores."""
        return f"success-bonus-1@{self.options.threshold:g}/{self.options.share:g}"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` when it has no valid return."""
        total, steps = environment_return(trajectory)
        success, share = float(total >= self.options.threshold - _ROUNDING), self.options.share
        return Score(
            trajectory_id=trajectory.id,
            reward=(1 - share) * total + share * success,
            detail={"return": total, "success": success, "steps": steps},
            reward_version=self.version,
        )


def environment_return(trajectory: Trajectory) -> tuple[float, int]:
    """The return and the number of executed steps.

    Raises ``GraderError`` for a failed episode, for one without an executed action, and for one whose last action has
    no observation (for example after a timeout), because its effect is unknown.
    """
    if trajectory.failure is not None:
        raise GraderError(f"{trajectory.id} failed ({trajectory.failure.kind}): {trajectory.failure.message}")
    rewards = [node.reward for node in trajectory.sampled()]
    if not rewards:
        raise GraderError(f"{trajectory.id} has no executed action ({trajectory.stop}), so no return")
    answered = [reward for reward in rewards if reward is not None]
    if len(answered) < len(rewards):
        raise GraderError(f"{trajectory.id} holds an action that got no answer ({trajectory.stop})")
    if not math.isfinite(total := sum(answered)):
        raise GraderError(f"{trajectory.id} has a return that is not finite")
    return total, len(answered)
