"""Advantage estimators: rewards of whole rollouts -> one advantage per rollout. Pure functions, no torch.

All take the rewards, the group (rollouts of one task) and the number of sampled tokens of each rollout, and return
advantages in the same order. Where published implementations disagree:

- ``whiten`` divides by the *biased* standard deviation over tokens, with a floor of 1e-8 for the variance (OpenRLHF, by
  the authors of REINFORCE++; verl divides by the unbiased one);
- GRPO's standard deviation is Bessel-corrected, and 1e-6 is added to it (verl; TRL adds 1e-4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

VARIANCE_FLOOR, EPSILON = 1e-8, 1e-6
"""The values in OpenRLHF and verl: they avoid a division by zero where all advantages are equal."""


class RolloutBatch(NamedTuple):
    """The rollouts of one batch; each field has one entry per rollout. ``lengths`` are in sampled tokens."""

    rewards: Sequence[float]
    groups: Sequence[int]
    lengths: Sequence[int]


def returns(rollouts: RolloutBatch) -> list[float]:
    """The rewards themselves, without a baseline (REINFORCE, Williams 1992); no groups."""
    return [float(reward) for reward in rollouts.rewards]


def nothing(rollouts: RolloutBatch) -> list[float]:
    """Zeros: nothing is learnt from rewards."""
    return [0.0] * len(rollouts.rewards)


def rloo(rollouts: RolloutBatch) -> list[float]:
    """RLOO, the leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740): ``(r - mean) n / (n - 1)``.

    A group of one rollout has no baseline; its advantage is 0.
    """
    return _per_group(rollouts, _leave_one_out)


def grpo(rollouts: RolloutBatch) -> list[float]:
    """GRPO (Shao et al. 2024, arXiv 2402.03300): ``(r - mean) / (std + 1e-6)`` of the group, std with n - 1.

    A group of one rollout has no baseline; its advantage is 0 (in verl, its reward).
    """
    return _per_group(rollouts, _standardise)


def dr_grpo(rollouts: RolloutBatch) -> list[float]:
    """Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): ``r - mean`` of the group, not divided by its deviation."""
    return _per_group(rollouts, centre)


@dataclass(frozen=True)
class Estimator:
    """An algorithm's advantages: a baseline, and whitening over all tokens of the batch if ``whitened``.

    ``grouped``: whether it compares the rollouts of a group.
    """

    baseline: Callable[[RolloutBatch], list[float]]
    grouped: bool = True
    whitened: bool = False

    def __call__(self, rollouts: RolloutBatch) -> list[float]:
        """Advantages of whole rollouts."""
        values = self.baseline(rollouts)
        return whiten(values, rollouts.lengths) if self.whitened else values


ESTIMATORS: Mapping[str, Estimator] = {
    # REINFORCE++ (Hu 2025, arXiv 2501.03262): without groups, and its variant with the group's mean as baseline.
    "reinforce++": Estimator(returns, grouped=False, whitened=True),
    "reinforce++-baseline": Estimator(dr_grpo, whitened=True),
    "rloo": Estimator(rloo),
    "grpo": Estimator(grpo),
    "dr-grpo": Estimator(dr_grpo),
}


def centre(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group minus their mean."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def whiten(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Zero mean and unit variance over tokens, where each of the ``lengths[i]`` tokens has the value ``values[i]``.

    The normalisation of REINFORCE++ (Hu 2025, arXiv 2501.03262).
    """
    tokens = sum(lengths)
    if tokens == 0:
        return list(values)
    mean = sum(value * length for value, length in zip(values, lengths, strict=True)) / tokens
    squares = sum(length * (value - mean) ** 2 for value, length in zip(values, lengths, strict=True))
    scale = 1.0 / math.sqrt(max(squares / tokens, VARIANCE_FLOOR))
    return [(value - mean) * scale for value in values]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    n = len(rewards)
    return [value * n / (n - 1) for value in centre(rewards)] if n > 1 else [0.0]


def _standardise(rewards: Sequence[float]) -> list[float]:
    n = len(rewards)
    if n == 1:
        return [0.0]
    centred = centre(rewards)
    deviation = math.sqrt(sum(value * value for value in centred) / (n - 1))
    return [value / (deviation + EPSILON) for value in centred]


def _per_group(rollouts: RolloutBatch, of_group: Callable[[Sequence[float]], list[float]]) -> list[float]:
    members: dict[int, list[int]] = {}
    for index, group in enumerate(rollouts.groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rollouts.rewards)
    for indices in members.values():
        for index, value in zip(indices, of_group([rollouts.rewards[i] for i in indices]), strict=True):
            advantages[index] = value
    return advantages
