"""What counts as a success: the criterion of each known environment, unless an option or a reward's threshold says it.

Rewards differ: some environments pay 1.0 at the end, some less for each step that it took, some charge each step.
"""

from __future__ import annotations

from collections.abc import Mapping

from openhands_rl_plugin.config.rl import RewardSettings
from openhands_rl_plugin.core.types import Frozen, StopReason

# Sums of step rewards, such as 10 x 0.1, must not miss a bound by a rounding error.
_ROUNDING = 1e-9
_WITH_THRESHOLD = frozenset({"success", "success-bonus"})
_OF_RETURN = _WITH_THRESHOLD | {"return"}


class SuccessRule(Frozen):
    """``at``: the least return of a success (``None``: any). ``ended``: only if the environment ended the episode."""

    at: float | None = 1.0
    ended: bool = False

    def holds(self, reward: float, stop: StopReason) -> bool:
        """Whether an episode with this return is a success."""
        return (self.at is None or reward >= self.at - _ROUNDING) and (not self.ended or stop is StopReason.TERMINATED)

    def __str__(self) -> str:
        parts = [] if self.at is None else [f"a return of at least {self.at:g}"]
        return " and ".join([*parts, *(["an end that the environment made"] if self.ended else [])])


CRITERIA: Mapping[str, SuccessRule] = {
    "webshop": SuccessRule(),  # the whole score: type, attributes, options and price
    "textcraft": SuccessRule(),
    "alfworld": SuccessRule(),
    "sciworld": SuccessRule(),  # a score of 100, which the client divides by 100
    "babyai": SuccessRule(at=0.5),  # 1 - 0.9 x steps / limit, and its server ends no level at 0.5 or below
    "grid_world": SuccessRule(at=None, ended=True),  # -0.1 a step; it ends at the goal alone
    "maze": SuccessRule(at=None, ended=True),
}
"""By the last part of an environment's name; all others: a return of at least 1.0."""


def success_rule(environment: str, reward: RewardSettings | None = None, at: float | None = None) -> SuccessRule:
    """The criterion in force: ``at``, else the threshold of ``[rl.reward]``, else the environment's."""
    if at is not None:
        return SuccessRule(at=at)
    threshold = reward.options.get("threshold") if reward is not None and reward.name in _WITH_THRESHOLD else None
    if isinstance(threshold, int | float):
        return SuccessRule(at=float(threshold))
    return CRITERIA.get(environment.rpartition("/")[2], SuccessRule())


def judged_by_return(reward: RewardSettings) -> bool:
    """Whether the reward is a function of the return, so that a criterion on the return applies."""
    return reward.name in _OF_RETURN
