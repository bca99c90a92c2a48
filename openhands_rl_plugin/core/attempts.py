"""Several attempts at each task: how often one of k succeeds, how often the one that a verifier picks does.

Both are expectations over all subsets of k attempts, computed exactly from the n that were made; nothing is shuffled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from openhands_rl_plugin.core.statistics import Estimate


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

    Fewer than two tasks say nothing about others: [0, 1]. Where every task has the same figure, the interval has no
    width; ``statistics.wilson`` is the better one for plain successes and failures. The same seed, the same interval.
    """
    n = len(values)
    mean = sum(values) / n if n else math.nan
    if n < 2:
        return Estimate(mean=mean, low=0.0, high=1.0, n=n)
    generator = random.Random(seed)
    means = sorted(sum(generator.choices(values, k=n)) / n for _ in range(repeats))
    return Estimate(mean=mean, low=means[int(0.025 * repeats)], high=means[max(0, int(0.975 * repeats) - 1)], n=n)


def _check_k(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, but must be between 1 and the number of attempts, {n}")
