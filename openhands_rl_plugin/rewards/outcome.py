"""Rewards from the environment's return; where the environment gives no rewards, from the recorded judgement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import Field

from openhands_rl_plugin.config.success import own_rule
from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.judgements import UNJUDGED, SuccessRule, newest_outcome
from openhands_rl_plugin.core.types import Frozen, JsonObject, Score, StopReason, Trajectory, pays_rewards

# Then an action may have no answer because the answer did not come.
_CUT_OFF = frozenset({StopReason.TIMEOUT, StopReason.UNFINISHED})


class _OfReturn(ABC):
    """A reward that is a function of the return."""

    version: str

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` when it has no valid return."""
        total, steps = environment_return(trajectory)
        return self._score(trajectory, total, {"steps": steps})

    def from_record(self, trajectory: Trajectory, scores: Sequence[Score]) -> Score | None:
        """Where no step was paid, the newest judgement is the return."""
        told = told_return(trajectory, scores)
        if told is None or told.reward is None or any(score.reward_version == self.version for score in scores):
            return None
        return self._score(trajectory, told.reward, {"judged_by": told.reward_version})

    def _score(self, trajectory: Trajectory, total: float, detail: JsonObject) -> Score:
        reward, more = self._judge(total, trajectory)
        return Score(trajectory_id=trajectory.id, reward=reward, detail={**more, **detail}, reward_version=self.version)

    @abstractmethod
    def _judge(self, total: float, trajectory: Trajectory) -> tuple[float, JsonObject]:
        """The reward of the episode's return, and details."""


class ReturnOptions(Frozen):
    """No options."""


class ReturnReward(_OfReturn):
    """The environment's return: the undiscounted sum of the step rewards on the acted path."""

    Options = ReturnOptions
    version = "return-1"

    def __init__(self, options: ReturnOptions | None = None) -> None:
        self.options = options or ReturnOptions()

    def _judge(self, total: float, trajectory: Trajectory) -> tuple[float, JsonObject]:
        return total, {}


class SuccessOptions(Frozen):
    """``threshold``: the least return of a success (default: the criterion of the episode's environment)."""

    threshold: float | None = Field(default=None, allow_inf_nan=False)


class SuccessReward(_OfReturn):
    """1.0 for a success, else 0.0."""

    Options = SuccessOptions

    def __init__(self, options: SuccessOptions | None = None) -> None:
        self.options = options or SuccessOptions()
        # Thresholds give different scores.
        self.version = f"success-1@{_named(self.options.threshold)}"

    def _judge(self, total: float, trajectory: Trajectory) -> tuple[float, JsonObject]:
        return float(_success(total, trajectory, self.options.threshold)), {"return": total}


class BonusOptions(Frozen):
    """``threshold``: the least return of a success (default: the criterion of the episode's environment); ``share`` in
    [0, 1]: the weight of success."""

    threshold: float | None = Field(default=None, allow_inf_nan=False)
    share: float = Field(default=0.5, ge=0, le=1)


class SuccessBonusReward(_OfReturn):
    """``(1 - share) * return + share * success``: partial credit, with a bonus for success."""

    Options = BonusOptions

    def __init__(self, options: BonusOptions | None = None) -> None:
        self.options = options or BonusOptions()
        # Options change the scores.
        self.version = f"success-bonus-1@{_named(self.options.threshold)}/{self.options.share:g}"

    def _judge(self, total: float, trajectory: Trajectory) -> tuple[float, JsonObject]:
        success, share = float(_success(total, trajectory, self.options.threshold)), self.options.share
        return (1 - share) * total + share * success, {"return": total, "success": success}


def _success(total: float, trajectory: Trajectory, threshold: float | None) -> bool:
    rule = own_rule(trajectory.task.environment) if threshold is None else SuccessRule(at=threshold)
    return rule.holds(total, trajectory.stop)


def _named(threshold: float | None) -> str:
    return "environment" if threshold is None else f"{threshold:g}"


def environment_return(trajectory: Trajectory) -> tuple[float, int]:
    """The return and the number of executed steps.

    Raises ``GraderError`` for a failed episode, for one without an executed action, for one whose environment pays
    nothing, and for one whose last action has no observation (for example after a timeout): its effect is unknown.
    """
    if trajectory.failure is not None:
        raise GraderError(f"{trajectory.id} failed ({trajectory.failure.kind}): {trajectory.failure.message}")
    rewards = [node.reward for node in trajectory.sampled()]
    if not rewards:
        raise GraderError(f"{trajectory.id} has no executed action ({trajectory.stop}), so no return")
    answered = [reward for reward in rewards if reward is not None]
    paid = pays_rewards(trajectory.task.environment, trajectory.evidence) or trajectory.episode_return
    if not paid or not (answered or trajectory.stop in _CUT_OFF):
        raise GraderError(UNJUDGED)
    if len(answered) < len(rewards):
        raise GraderError(f"{trajectory.id} holds an action that got no answer ({trajectory.stop})")
    return sum(answered), len(answered)


def told_return(trajectory: Trajectory, scores: Sequence[Score]) -> Score | None:
    """The newest judgement of the outcome, where no step was paid: then that is the return."""
    if trajectory.failure is not None or trajectory.known_return is not None:
        return None
    return newest_outcome(scores)
