"""Rewards from what an episode earned or was judged: its return, success, the recorded judgement, tests, people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from openhands_rl_plugin.config.build import success_rule
from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.judgements import HUMAN, UNJUDGED, SuccessRule, consensus, host_evidence, newest_outcome
from openhands_rl_plugin.core.messages import json_object
from openhands_rl_plugin.core.records import Label
from openhands_rl_plugin.core.types import Frozen, JsonObject, Score, StopReason, Trajectory, rewards_steps

# Then an action may have no answer because the answer did not come.
_CUT_OFF = frozenset({StopReason.TIMEOUT, StopReason.UNFINISHED})
_UNKNOWN = ("error_eval", "infra_failure")


class NoOptions(Frozen):
    """No options."""


class _Reward:
    """A reward with checked options, as the registry makes it."""

    Options: ClassVar[type[Frozen]] = NoOptions
    version: str

    def __init__(self, options: Frozen | None = None) -> None:
        self.options: Any = options or self.Options()

    def _score(self, trajectory: Trajectory, reward: float, detail: JsonObject) -> Score:
        return Score(trajectory_id=trajectory.id, reward=reward, detail=detail, reward_version=self.version)


class ReturnReward(_Reward):
    """The environment's return: the undiscounted sum of the step rewards on the acted path."""

    version = "return-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` when it has no valid return."""
        total, steps = environment_return(trajectory)
        reward, detail = self._judge(total, trajectory)
        return self._score(trajectory, reward, {**detail, "steps": steps})

    def from_record(self, trajectory: Trajectory, scores: Sequence[Score]) -> Score | None:
        """If no step had a reward, use the newest judgement as the return."""
        returned = trajectory.failure is not None or trajectory.known_return is not None
        found = None if returned else newest_outcome(scores)
        if found is None or found.reward is None or any(score.reward_version == self.version for score in scores):
            return None
        reward, detail = self._judge(found.reward, trajectory)
        return self._score(trajectory, reward, {**detail, "judged_by": found.reward_version})

    def _judge(self, total: float, trajectory: Trajectory) -> tuple[float, JsonObject]:
        """The reward of the episode's return, and details."""
        return total, {}


class SuccessOptions(Frozen):
    """``threshold``: the least return of a success (default: the criterion of the episode's environment)."""

    threshold: float | None = Field(default=None, allow_inf_nan=False)


class SuccessReward(ReturnReward):
    """1.0 for a success, else 0.0. Its version has the options, because they change the scores."""

    Options = SuccessOptions

    def __init__(self, options: Frozen | None = None) -> None:
        super().__init__(options)
        at = self.options.threshold
        self._named = "environment" if at is None else f"{at:g}"
        self.version = f"success-1@{self._named}"

    def _judge(self, total: float, trajectory: Trajectory) -> tuple[float, JsonObject]:
        at = self.options.threshold
        rule = success_rule(trajectory.task.environment) if at is None else SuccessRule(at=at)
        return float(rule.holds(total, trajectory.stop)), {"return": total}


class BonusOptions(SuccessOptions):
    """``share`` in [0, 1]: the weight of success."""

    share: float = Field(default=0.5, ge=0, le=1)


class SuccessBonusReward(SuccessReward):
    """``(1 - share) * return + share * success``: partial credit, with a bonus for success."""

    Options = BonusOptions

    def __init__(self, options: Frozen | None = None) -> None:
        super().__init__(options)
        self.version = f"success-bonus-1@{self._named}/{self.options.share:g}"

    def _judge(self, total: float, trajectory: Trajectory) -> tuple[float, JsonObject]:
        success, detail = super()._judge(total, trajectory)
        share = self.options.share
        return (1 - share) * total + share * success, {**detail, "success": success}


class RecordedReward(_Reward):
    """The newest judgement of the outcome (``newest_outcome``) by any reward or person; else the environment's return.

    It is read each time and never stored, so that a later verdict counts.
    """

    version = "recorded-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """The return of an episode without scores. Raises ``GraderError`` where there is none."""
        if trajectory.failure is not None:
            raise GraderError(f"{trajectory.id} failed ({trajectory.failure.kind}): {trajectory.failure.message}")
        if (score := self.from_record(trajectory, ())) is None:
            raise GraderError(UNJUDGED)
        return score

    def from_record(self, trajectory: Trajectory, scores: Sequence[Score]) -> Score | None:
        """The score that follows from ``scores``, oldest first; ``None`` where the reward has to judge itself."""
        newest = newest_outcome(scores)
        judge, reward = (newest.reward_version, newest.reward) if newest else ("return", trajectory.known_return)
        if reward is None or trajectory.failure is not None:
            return None
        return self._score(trajectory, reward, {"judged_by": judge})


class TestsReward(_Reward):
    """1.0 when the recorded test report has ``resolved`` set, else 0.0.

    The report is in ``evidence["test_result"]["report"]``, as in OpenHands' evaluation. The score's details are those
    of ``evidence["test_result"]["verdict"]``.
    """

    __test__ = False  # pytest must not collect it
    version = "tests-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` when no tests ran, or their environment failed."""
        result = json_object(host_evidence(trajectory).get("test_result"))
        report = result.get("report")
        if not isinstance(report, dict) or not isinstance(resolved := report.get("resolved"), bool):
            raise GraderError(f"{trajectory.id} has no report of tests in its evidence: grade it first")
        if any(report.get(name) is True for name in _UNKNOWN):
            raise GraderError(f"{trajectory.id}: its tests could not be run, so nothing is known about its patch")
        verdict = result.get("verdict")
        detail: JsonObject = {"resolved": resolved, **({"verdict": verdict} if isinstance(verdict, dict) else {})}
        return self._score(trajectory, float(resolved), detail)


class HumanReward(_Reward):
    """The verdict of more than half of the labellers, each with their last one; without one there is no reward.

    Labels become scores only when this reward is asked for (``score --reward human``, ``train --reward human``). An
    opinion in lists and statistics: it never takes the place of a grader's judgement.

    Examples:
        >>> from openhands_rl_plugin.core.records import LabelKind
        >>> given = [("ann", 1.0), ("bob", 0.0), ("cay", 1.0)]
        >>> labels = [
        ...     Label(id=who, trajectory_id="one", kind=LabelKind.VERDICT, value=value, author=who, at=0.0)
        ...     for who, value in given
        ... ]
        >>> score = HumanReward().from_labels("one", labels)
        >>> score.reward, score.detail
        (1.0, {'labellers': 3, 'agree': 2})
        >>> HumanReward().from_labels("one", labels[:2]).reward is None
        True
    """

    version = f"{HUMAN}1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Raises ``GraderError``: an episode itself does not say what people think of it."""
        raise GraderError("nobody gave a verdict that counts: label it in the studio")

    def from_labels(self, trajectory_id: str, labels: Sequence[Label]) -> Score | None:
        """As in ``JudgesLabels``."""
        found = consensus(labels)
        if found is None:
            return None
        detail: JsonObject = {"labellers": found.labellers, "agree": found.agree}
        return Score(trajectory_id=trajectory_id, reward=found.value, detail=detail, reward_version=self.version)


def environment_return(trajectory: Trajectory) -> tuple[float, int]:
    """The return and the number of executed steps.

    Raises ``GraderError`` for a failed episode, for one without an executed action, for one whose environment gives
    nothing, and for one whose last action has no observation (for example after a timeout): its effect is unknown.
    """
    if trajectory.failure is not None:
        raise GraderError(f"{trajectory.id} failed ({trajectory.failure.kind}): {trajectory.failure.message}")
    rewards = [node.reward for node in trajectory.sampled()]
    if not rewards:
        raise GraderError(f"{trajectory.id} has no executed action ({trajectory.stop}), so no return")
    answered = [reward for reward in rewards if reward is not None]
    rewarded = rewards_steps(trajectory.task.environment, trajectory.evidence) or trajectory.episode_return
    if not rewarded or not (answered or trajectory.stop in _CUT_OFF):
        raise GraderError(UNJUDGED)
    if len(answered) < len(rewards):
        raise GraderError(f"{trajectory.id} holds an action that got no answer ({trajectory.stop})")
    return sum(answered), len(answered)
