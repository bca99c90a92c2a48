"""Comparison of two evaluations over the same tasks: difference, confidence interval, p-value."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.statistics import Estimate, paired_difference, sign_greater
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.report.figures import success_rates
from openhands_rl_plugin.evals.report.labels import labels_of
from openhands_rl_plugin.evals.report.run_records import RunRecord

MCNEMAR, PERMUTATION = "exact McNemar", "paired permutation"

_ROUNDS = 10_000
_EXACT_UP_TO = 14
_ROUNDING = 1e-12


class Comparison(Frozen):
    """``second`` against ``first``, named by what differs, over the ``tasks`` with known outcomes in both.

    ``difference`` is that of the mean success rates, its interval a bootstrap over tasks. ``p_value`` is two-sided, by
    ``test``: McNemar's exact one where every task has one attempt on either side, else a permutation of the signs of
    the tasks' differences. ``gained`` and ``lost`` are the tasks that the second solves more often, or less.
    """

    first: str
    second: str
    tasks: int
    only_first: int
    only_second: int
    rate_first: float
    rate_second: float
    difference: Estimate
    p_value: float
    test: str
    gained: tuple[str, ...]
    lost: tuple[str, ...]


def compare(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> Comparison:
    """The comparison of two groups of runs. Raises ``ConfigError`` when they share no task."""
    rates = [success_rates(outcome for run in runs for outcome in run.outcomes) for runs in (first, second)]
    shared = sorted(rates[0].keys() & rates[1].keys())
    if not shared:
        raise ConfigError("the two have no graded task in common: compare runs over the same data set")
    before, after = ([own[name] for name in shared] for own in rates)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    single = all(rate in (0.0, 1.0) for rate in (*before, *after)) and len(first) == len(second) == 1
    gained = tuple(name for name, change in zip(shared, differences, strict=True) if change > _ROUNDING)
    lost = tuple(name for name, change in zip(shared, differences, strict=True) if change < -_ROUNDING)
    named = labels_of([first[0], second[0]])
    return Comparison(
        first=named[0],
        second=named[1],
        tasks=len(shared),
        only_first=len(rates[0]) - len(shared),
        only_second=len(rates[1]) - len(shared),
        rate_first=math.fsum(before) / len(shared),
        rate_second=math.fsum(after) / len(shared),
        difference=paired_difference(before, after),
        p_value=mcnemar(len(gained), len(lost)) if single else sign_permutation(differences),
        test=MCNEMAR if single else PERMUTATION,
        gained=gained,
        lost=lost,
    )


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value of McNemar's test: tasks that only one side solves, as tosses of a fair coin."""
    return min(1.0, 2 * sign_greater(max(gained, lost), min(gained, lost)))


def sign_permutation(differences: Sequence[float]) -> float:
    """The two-sided p-value of a sign permutation test on the mean of paired differences.

    Every assignment of signs is tried for up to 14 differences that are not zero, else 10,000 seeded ones.
    """
    moved = [each for each in differences if abs(each) > _ROUNDING]
    observed = abs(math.fsum(moved)) - _ROUNDING
    if not moved:
        return 1.0
    if len(moved) <= _EXACT_UP_TO:
        signs = ([1 if at >> bit & 1 else -1 for bit in range(len(moved))] for at in range(2 ** len(moved)))
        extreme = [_sum(moved, each) >= observed for each in signs]
        return sum(extreme) / len(extreme)
    generator = random.Random(0)
    extreme = [_sum(moved, generator.choices((-1, 1), k=len(moved))) >= observed for _ in range(_ROUNDS)]
    # The observed assignment is one of them, so that no p-value is zero.
    return (sum(extreme) + 1) / (_ROUNDS + 1)


def _sum(differences: Sequence[float], signs: Sequence[int]) -> float:
    return abs(math.fsum(each * sign for each, sign in zip(differences, signs, strict=True)))
