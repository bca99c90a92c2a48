"""Which episodes are compared with which, and one advantage for each of them.

One thing is done otherwise than in OpenRLHF, verl and TRL: a group whose rewards are all equal is left out of every
algorithm that compares in groups. It has nothing to say, and where advantages are whitened over tokens it would get
some wherever the lengths differ. For DAPO this is its dynamic filtering.
"""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Frozen, Trajectory
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.credit.estimators import Rollouts
from openhands_rl_plugin.training.data.eligibility import is_interrupted, is_overlong

EQUAL = 1e-9


class ValidGroups(Frozen):
    """Indices of the episodes that can be compared, a tuple a group, and why the others cannot.

    ``valid`` are all that have a reward which says something about the policy, in groups or not. ``flat`` counts the
    episodes of groups whose rewards are all equal; ``alone`` those that are the only valid one of their group, so that
    there is no baseline for them; ``overlong`` those that a limit cut short, where they are to be left out.
    """

    groups: tuple[tuple[int, ...], ...]
    valid: tuple[int, ...]
    failed: int
    unscored: int
    overlong: int
    flat: int
    alone: int


class GroupAdvantages(Frozen):
    """One advantage a trajectory in the order given, ``None`` for those that take no part, and why they do not.

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
    """The groups with a signal. Failed, timed-out, unfinished and unscored episodes leave them, and are counted.

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
    """Advantages of whole episodes; ``rewards[i]`` is that of ``trajectories[i]`` and ``None`` when it was not scored.

    ``whitened`` false leaves out the last step of the algorithms that whiten, for callers that add to the advantages
    first. See ``valid_groups`` for who is left out.
    """
    settings = settings or TrainingSettings()
    chosen = valid_groups(trajectories, rewards, settings)
    order = [(index, number) for number, members in enumerate(chosen.groups) for index in members]
    rollouts = Rollouts(
        rewards=[float(rewards[index] or 0.0) for index, _ in order],
        groups=[number for _, number in order],
        lengths=[_sampled_tokens(trajectories[index]) for index, _ in order],
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


def _sampled_tokens(trajectory: Trajectory) -> int:
    return sum(len(node.tokens.sampled_ids) for node in trajectory.sampled() if node.tokens is not None)
