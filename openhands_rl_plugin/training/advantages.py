"""REINFORCE++ with a group baseline (Hu 2025, "REINFORCE++", arXiv 2501.03262).

The functions follow OpenRLHF's ``compute_advantages_and_returns`` for ``reinforce_baseline``
(``openrlhf/trainer/ppo_utils/experience_maker.py``): subtract the group's mean, then whiten over all action tokens of
the batch, with the biased variance and a floor of 1e-8. One thing is done otherwise: a group whose rewards are all
equal is left out, because whitening over tokens would give its episodes an advantage wherever the lengths differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from openhands_rl_plugin.types import Frozen, StopReason, Trajectory

VARIANCE_FLOOR = 1e-8
EQUAL = 1e-9

# Ends that say nothing about the policy: the episode would have gone on.
_NO_SAMPLE = frozenset({StopReason.TIMEOUT, StopReason.UNFINISHED})


class GroupBaseline(Frozen):
    """One advantage a trajectory in the order given, ``None`` for those that take no part, and why they do not.

    ``flat`` counts the episodes of groups whose rewards are all equal; ``alone`` those that are the only valid one of
    their group, so that there is no baseline for them.
    """

    advantages: tuple[float | None, ...]
    used: int
    failed: int
    unscored: int
    flat: int
    alone: int

    def as_floats(self) -> dict[str, float]:
        """The counts, for an adapter's manifest."""
        return {
            f"episodes_{name}": float(getattr(self, name)) for name in ("used", "failed", "unscored", "flat", "alone")
        }


def group_advantages(trajectories: Sequence[Trajectory], rewards: Sequence[float | None]) -> GroupBaseline:
    """Advantages of whole episodes; ``rewards[i]`` is that of ``trajectories[i]`` and ``None`` when it was not scored.

    Failed, timed-out and unfinished episodes, unscored ones and groups without a signal leave the baseline and are
    counted.
    """
    failed = [trajectory.failure is not None or trajectory.stop in _NO_SAMPLE for trajectory in trajectories]
    groups: dict[str, list[int]] = {}
    for index, (trajectory, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        if reward is not None and not failed[index]:
            groups.setdefault(trajectory.group_id, []).append(index)
    alone = [members for members in groups.values() if len(members) == 1]
    flat = [members for members in groups.values() if len(members) > 1 and _all_equal([rewards[i] for i in members])]
    live = [members for members in groups.values() if len(members) > 1 and members not in flat]
    order = [index for members in live for index in members]
    centred = [value for members in live for value in centre([float(rewards[i] or 0.0) for i in members])]
    whitened = whiten(centred, [_sampled_tokens(trajectories[index]) for index in order])
    advantages: list[float | None] = [None] * len(trajectories)
    for index, advantage in zip(order, whitened, strict=True):
        advantages[index] = advantage
    return GroupBaseline(
        advantages=tuple(advantages),
        used=len(order),
        failed=sum(failed),
        unscored=sum(reward is None and not bad for reward, bad in zip(rewards, failed, strict=True)),
        flat=sum(len(members) for members in flat),
        alone=len(alone),
    )


def centre(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group minus their mean."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def whiten(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Zero mean and unit (biased) variance over tokens, where ``values[i]`` stands on each of ``lengths[i]`` tokens."""
    tokens = sum(lengths)
    if tokens == 0:
        return list(values)
    mean = sum(value * length for value, length in zip(values, lengths, strict=True)) / tokens
    variance = sum(length * (value - mean) ** 2 for value, length in zip(values, lengths, strict=True)) / tokens
    scale = 1.0 / math.sqrt(max(variance, VARIANCE_FLOOR))
    return [(value - mean) * scale for value in values]


def _all_equal(rewards: Sequence[float | None]) -> bool:
    known = [reward for reward in rewards if reward is not None]
    return max(known) - min(known) <= EQUAL


def _sampled_tokens(trajectory: Trajectory) -> int:
    return sum(len(node.tokens.sampled_ids) for node in trajectory.sampled() if node.tokens is not None)
