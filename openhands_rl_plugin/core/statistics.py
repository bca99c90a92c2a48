"""Success rates of one run or several attempts, differences between two runs, and their 95% intervals.

``pass_at_k`` and ``best_at_k`` are expectations over all subsets of k attempts, computed exactly from the n that were
made; nothing is shuffled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from openhands_rl_plugin.core.types import Frozen

NORMAL_95 = 1.959963984540054


class Estimate(Frozen):
    """A mean with its 95% interval over ``n`` tasks; of no task all are ``None``."""

    mean: float | None
    low: float | None
    high: float | None
    n: int


NOTHING = Estimate(mean=None, low=None, high=None, n=0)


def wilson(successes: int, n: int) -> Estimate:
    """Wilson score interval of a proportion (Wilson 1927); ``NOTHING`` with ``n=0``."""
    if n == 0:
        return NOTHING
    p, z2 = successes / n, NORMAL_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Estimate(mean=p, low=max(0.0, centre - half), high=min(1.0, centre + half), n=n)


def sign_greater(more: int, fewer: int) -> float:
    """The chance that ``more`` or more of ``more + fewer`` pairs differ in one direction, if either is as likely.

    The one-sided exact sign test; of pairs of 0 and 1 that is McNemar's (1947). 1.0 where no pair differs.
    """
    pairs = more + fewer
    return sum(math.comb(pairs, k) for k in range(more, pairs + 1)) / 2**pairs


def paired_difference(before: Sequence[float], after: Sequence[float], *, resamples: int = 10_000) -> Estimate:
    """Mean of ``after - before`` over the same tasks in the same order, percentile bootstrap over tasks.

    Raises ``ValueError`` when the lengths differ. The resampling is seeded: the same data give the same interval.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} tasks before and {len(after)} after: a paired comparison needs the same ones")
    differences = [b - a for a, b in zip(before, after, strict=True)]
    return _bootstrap(differences, resamples, seed=0) if differences else NOTHING


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of ``k`` attempts succeeds, from ``n`` attempts of which ``c`` did.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), ``1 - C(n - c, k) / C(n, k)``. Raises ``ValueError``
    unless ``1 <= k <= n`` and ``0 <= c <= n``.
    """
    _check_k(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"{c} of {n} attempts cannot have succeeded")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_at_k(scores: Sequence[float], outcomes: Sequence[float], k: int) -> float:
    """The expected outcome of the attempt with the highest score among ``k`` of the n attempts at one task.

    ``outcomes``: one number (or truth value) an attempt. Attempts with equal scores are picked with equal chances.
    Raises ``ValueError`` for lengths that differ, a score that is not a number, or unless ``1 <= k <= n``.
    """
    if len(scores) != len(outcomes):
        raise ValueError(f"{len(scores)} scores for {len(outcomes)} outcomes: every attempt needs both")
    if any(math.isnan(score) for score in scores):
        raise ValueError("a score is not a number, so there is no best attempt")
    _check_k(len(scores), k)
    expected, below = 0.0, 0
    for _, tied in groupby(sorted(zip(scores, outcomes, strict=True), key=itemgetter(0)), key=itemgetter(0)):
        values = [float(outcome) for _, outcome in tied]
        # The best of the subset is among these when none of it is above them and not all of it is below.
        subsets = math.comb(below + len(values), k) - math.comb(below, k)
        expected += subsets / math.comb(len(scores), k) * (sum(values) / len(values))
        below += len(values)
    return expected


def over_tasks(values: Sequence[float], *, repeats: int = 2000, seed: int = 0) -> Estimate:
    """The mean of one figure a task, each in [0, 1], with its 95% interval: a percentile bootstrap over tasks.

    One task says nothing about others: [0, 1]. Plain successes and failures have ``wilson``'s interval: a
    bootstrap of 0 of 3 has no width. The same seed, the same interval.
    """
    n = len(values)
    if n >= 2 and all(value in (0, 1) for value in values):
        return wilson(round(sum(values)), n)
    if n < 2:
        return Estimate(mean=values[0], low=0.0, high=1.0, n=1) if n else NOTHING
    return _bootstrap(values, repeats, seed)


def _check_k(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, but must be between 1 and the number of attempts, {n}")


def _bootstrap(values: Sequence[float], resamples: int, seed: int) -> Estimate:
    """The mean and its percentile interval; one value or more."""
    n, generator = len(values), random.Random(seed)
    means = sorted(sum(generator.choices(values, k=n)) / n for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[max(0, int(0.975 * resamples) - 1)]
    return Estimate(mean=sum(values) / n, low=low, high=high, n=n)
