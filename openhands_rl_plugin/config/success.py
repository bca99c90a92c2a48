"""What counts as a success: the criterion of each known environment, unless an option or a reward's threshold says it.

Rewards differ: some environments pay 1.0 at the end, some less for each step that it took, some charge each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RewardSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.judgements import SuccessRule

_WITH_THRESHOLD = frozenset({"success", "success-bonus"})
_OF_RETURN = _WITH_THRESHOLD | {"return"}


CRITERIA: Mapping[str, SuccessRule] = {
    "webshop": SuccessRule(),  # the whole score: type, attributes, options and price
    "textcraft": SuccessRule(),
    "alfworld": SuccessRule(),
    "sciworld": SuccessRule(),  # a score of 100, which the client divides by 100
    "babyai": SuccessRule(at=0.5),  # 1 - 0.9 x steps / limit, and its server ends no level at 0.5 or below
    "grid_world": SuccessRule(at=None, ended=True),  # -0.1 a step; it ends at the goal alone
    "maze": SuccessRule(at=None, ended=True),
}
"""By the last part of an environment's name; else its class is asked (``success_rule``); else a return of 1.0."""


def success_rule(environment: str, reward: RewardSettings | None = None, at: float | None = None) -> SuccessRule:
    """The criterion in force: ``at``, else the threshold of ``[rl.reward]``, else the environment's."""
    if at is not None:
        return SuccessRule(at=at)
    threshold = reward.options.get("threshold") if reward is not None and reward.name in _WITH_THRESHOLD else None
    if isinstance(threshold, int | float):
        return SuccessRule(at=float(threshold))
    return own_rule(environment)


@cache
def own_rule(environment: str) -> SuccessRule:
    """The environment's own criterion. Classes are asked by their registered names only: stores name environments."""
    if (known := CRITERIA.get(environment.rpartition("/")[2])) is not None:
        return known
    kind, _, name = environment.partition("/")
    try:
        plugin = registry.load("environments", kind) if kind in registry.names("environments") else None
    except ConfigError:
        plugin = None  # of a package that is not here
    asked = getattr(plugin, "success_rule", None)
    return SuccessRule() if asked is None else asked(name)


def judged_by_return(reward: RewardSettings) -> bool:
    """Whether the reward is a function of the return, so that a criterion on the return applies."""
    return reward.name in _OF_RETURN
