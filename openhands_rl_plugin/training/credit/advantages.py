"""Groups of comparable episodes, and one advantage per episode.

One difference from OpenRLHF, verl and TRL: every algorithm with groups leaves out a group whose rewards are all equal.
Such a group has no signal, but whitening over tokens would give it advantages other than zero where lengths differ. For
DAPO this is its dynamic sampling (Yu et al. 2025, arXiv 2503.14476) without the resampling.
"""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Frozen, Trajectory
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.credit.estimators import RolloutBatch
from openhands_rl_plugin.training.data.batch import trained_nodes
from openhands_rl_plugin.training.data.eligibility import is_interrupted, is_overlong

EQUAL = 1e-9
"""Rewards that differ by at most this much are equal: sums of step rewards, such as 10 x 0.1, have rounding errors."""


class ValidGroups(Frozen):
    """Indices of the episodes that can be compared, one tuple per group, and counts of the others by reason.

    ``valid``: all episodes with a valid reward, in groups or not. ``flat`` counts the episodes of groups whose rewards
    are all equal; ``alone`` those that are the only valid one of their group and so have no baseline; ``overlong``
    those that were cut short by a limit, where ``overlong`` excludes them.
    """

    groups: tuple[tuple[int, ...], ...]
    valid: tuple[int, ...]
    failed: int
    unscored: int
    overlong: int
    flat: int
    alone: int


class GroupAdvantages(Frozen):
    """One advantage per trajectory, in the order given; ``None`` for the excluded ones, which are counted by reason.

    The counts are those of ``ValidGroups``; ``used`` is the number of advantages.
    """

    advantages: tuple[float | None, ...]
    used: int
    failed: int
    unscored: int
    flat: int
    alone: int
    overlong: int = 0

    def as_floats(self) -> dict[str, float]:
        """The counts, for an adapter's manifest."""
        return {
            f"episodes_{name}": float(getattr(self, name))
            for name in ("used", "failed", "unscored", "overlong", "flat", "alone")
        }


def valid_groups(
    trajectories: Sequence[Trajectory], rewards: Sequence[float | None], settings: TrainingSettings
) -> ValidGroups:
    """The groups with a signal; failed, timed-out, unfinished and unscored episodes are excluded and counted.

    An algorithm without groups compares all valid episodes with each other.
    """
    failed = [trajectory.failure is not None or is_interrupted(trajectory) for trajectory in trajectories]
    groups: dict[str, list[int]] = {}
    unscored = overlong = 0
    for index, (trajectory, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        if failed[index]:
            continue
        if reward is None:
            unscored += 1
        elif is_overlong(trajectory, settings):
            overlong += 1
        else:
            groups.setdefault(trajectory.group_id, []).append(index)
    members = list(groups.values())
    grouped = algorithm_of(settings).estimator.grouped
    alone = [each for each in members if grouped and len(each) == 1]
    flat = [each for each in members if grouped and len(each) > 1 and _all_equal([rewards[i] for i in each])]
    return ValidGroups(
        groups=tuple(tuple(each) for each in members if each not in alone and each not in flat),
        valid=tuple(index for each in members for index in each),
        failed=sum(failed),
        unscored=unscored,
        overlong=overlong,
        flat=sum(len(each) for each in flat),
        alone=len(alone),
    )


def group_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    settings: TrainingSettings | None = None,
    *,
    whitened: bool = True,
) -> GroupAdvantages:
    """Advantages of whole episodes; ``rewards[i]`` is the reward of ``trajectories[i]``, ``None`` if it has none.

    The formulas are in ``estimators``. ``whitened=False`` skips the whitening, for callers that add other advantages
    before it. See ``valid_groups`` for the episodes that are excluded.
    """
    settings = settings or TrainingSettings()
    chosen = valid_groups(trajectories, rewards, settings)
    order = [(index, number) for number, members in enumerate(chosen.groups) for index in members]
    rollouts = RolloutBatch(
        rewards=[float(rewards[index] or 0.0) for index, _ in order],
        groups=[number for _, number in order],
        lengths=[_trained_tokens(trajectories[index], settings) for index, _ in order],
    )
    estimator = algorithm_of(settings).estimator
    if whitened:
        values = estimator(rollouts, variance=settings.variance, epsilon=settings.std_epsilon)
    else:
        values = estimator.baseline(rollouts, settings.std_epsilon)
    advantages: list[float | None] = [None] * len(trajectories)
    for (index, _), advantage in zip(order, values, strict=True):
        advantages[index] = advantage
    counts = chosen.model_dump(include={"failed", "unscored", "overlong", "flat", "alone"})
    return GroupAdvantages(advantages=tuple(advantages), used=len(order), **counts)


def _all_equal(rewards: Sequence[float | None]) -> bool:
    known = [reward for reward in rewards if reward is not None]
    return max(known) - min(known) <= EQUAL


def _trained_tokens(trajectory: Trajectory, settings: TrainingSettings) -> int:
    tokens = (trajectory.nodes[at].tokens for at in trained_nodes(trajectory, condensations=settings.condensations))
    return sum(len(each.sampled_ids) for each in tokens if each is not None)
