"""The arithmetic of Monte Carlo tree search, apart from any tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Arm(NamedTuple):
    """An action as selection sees it: how often it was taken, its mean return, and the policy's prior for it."""

    visits: int
    value: float
    prior: float | None = None


def uct(arm: Arm, total: int, weight: float) -> float:
    """UCB1 for trees (Kocsis and Szepesvari 2006): ``Q + c sqrt(ln N / n)``; an action never taken comes first."""
    if arm.visits == 0:
        return math.inf
    return arm.value + weight * math.sqrt(math.log(total) / arm.visits)


def puct(arm: Arm, total: int, weight: float, first: float) -> float:
    """PUCT (Silver et al. 2017, AlphaGo Zero): ``Q + c P sqrt(N) / (1 + n)``; ``first`` is Q before the first visit."""
    assert arm.prior is not None
    value = arm.value if arm.visits else first
    return value + weight * arm.prior * math.sqrt(max(total, 1)) / (1 + arm.visits)


def best_arm(arms: Sequence[Arm], weight: float) -> int:
    """The index to select: by PUCT when every arm has a prior, else by UCT; the first of equals."""
    total = sum(arm.visits for arm in arms)
    if all(arm.prior is not None for arm in arms):
        first = sum(arm.visits * arm.value for arm in arms) / total if total else 0.0
        return max(range(len(arms)), key=lambda at: puct(arms[at], total, weight, first))
    return max(range(len(arms)), key=lambda at: uct(arms[at], total, weight))


def priors(logprobs: Sequence[float]) -> list[float]:
    """Softmax over the actions' mean logprobs a token: the policy's preference among those that were sampled."""
    highest = max(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


def width(visits: int, first: float, exponent: float, most: int) -> int:
    """Progressive widening (Couetoux et al. 2011): how many actions a state with so many visits may have."""
    return min(most, max(1, math.ceil(first * max(visits, 1) ** exponent)))
