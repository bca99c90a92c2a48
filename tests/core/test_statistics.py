"""Pass@k and Best@k against the definition: the mean over all subsets of k attempts; intervals against known values."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.core.statistics import (
    best_at_k,
    over_tasks,
    paired_difference,
    pass_at_k,
    sign_greater,
    wilson,
)

ATTEMPTS = st.lists(st.tuples(st.sampled_from([0.1, 0.5, 0.5000001, 0.9]), st.booleans()), min_size=1, max_size=7)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(outcomes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = list(combinations(outcomes, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(expected)


@given(ATTEMPTS, st.data())
def test_best_at_k_is_the_mean_over_subsets_with_ties_shared(
    attempts: list[tuple[float, bool]], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(attempts)))
    picked = []
    for subset in combinations(attempts, k):
        best = max(score for score, _ in subset)
        tied = [outcome for score, outcome in subset if score == best]
        picked.append(sum(tied) / len(tied))
    scores, outcomes = [score for score, _ in attempts], [outcome for _, outcome in attempts]
    assert best_at_k(scores, outcomes, k) == pytest.approx(sum(picked) / len(picked))


def test_the_interval_covers_the_true_mean_about_as_often_as_it_claims() -> None:
    generator = random.Random(7)
    covered = 0
    for trial in range(100):
        found = over_tasks([generator.betavariate(2, 3) for _ in range(60)], repeats=400, seed=trial)
        covered += found.low <= 2 / 5 <= found.high
    assert 88 <= covered <= 99


def test_wilson_has_the_textbook_values() -> None:
    estimate = wilson(15, 50)
    assert (estimate.low, estimate.high) == pytest.approx((0.1910, 0.4375), abs=1e-4)


def test_a_clear_improvement_excludes_zero_and_noise_does_not() -> None:
    better = paired_difference([0.0] * 60 + [1.0] * 40, [1.0] * 30 + [0.0] * 30 + [1.0] * 40)
    assert better.mean == pytest.approx(0.3)
    assert better.low > 0.15
    same = paired_difference([0.0, 1.0] * 50, [1.0, 0.0] * 50)
    assert same.low < 0 < same.high


def test_the_sign_test_has_the_textbook_values() -> None:
    assert sign_greater(0, 0) == sign_greater(0, 7) == 1.0
    assert sign_greater(4, 0) == 1 / 16 and sign_greater(0, 4) == 1.0
    assert sign_greater(9, 1) == pytest.approx(11 / 1024)
