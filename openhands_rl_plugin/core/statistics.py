"""Intervals for success rates and for differences between two runs over the same tasks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from openhands_rl_plugin.core.types import Frozen

NORMAL_95 = 1.959963984540054


class Estimate(Frozen):
    """A mean with its 95% interval over ``n`` tasks."""

    mean: float
    low: float
    high: float
    n: int


def wilson(successes: int, n: int) -> Estimate:
    """Wilson score interval of a proportion (Wilson 1927). With ``n=0`` nothing is known: [0, 1]."""
    if n == 0:
        return Estimate(mean=math.nan, low=0.0, high=1.0, n=0)
    p, z2 = successes / n, NORMAL_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Estimate(mean=p, low=max(0.0, centre - half), high=min(1.0, centre + half), n=n)


def paired_difference(before: Sequence[float], after: Sequence[float], *, resamples: int = 10_000) -> Estimate:
    """Mean of ``after - before`` over the same tasks in the same order, percentile bootstrap over tasks.

    Raises ``ValueError`` when the lengths differ. The resampling is seeded: the same data give the same interval.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} tasks before and {len(after)} after: a paired comparison needs the same ones")
    differences = [b - a for a, b in zip(before, after, strict=True)]
    n = len(differences)
    if n == 0:
        return Estimate(mean=math.nan, low=-1.0, high=1.0, n=0)
    generator = random.Random(0)
    means = sorted(sum(generator.choices(differences, k=n)) / n for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[int(0.975 * resamples) - 1]
    return Estimate(mean=sum(differences) / n, low=low, high=high, n=n)
