"""Intervals against known values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.core.statistics import Estimate, over_tasks, paired_difference, sign_greater, wilson


def test_wilson_has_the_textbook_values() -> None:
    estimate = wilson(15, 50)
    assert (estimate.low, estimate.high) == pytest.approx((0.1910, 0.4375), abs=1e-4)


def test_nothing_is_known_without_data() -> None:
    assert wilson(0, 0) == paired_difference([], []) == over_tasks([]) == Estimate(mean=None, low=None, high=None, n=0)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_the_mean_and_stays_in_the_unit_interval(case: tuple[int, int]) -> None:
    estimate = wilson(*case)
    assert 0.0 <= estimate.low <= estimate.mean + 1e-12
    assert estimate.mean <= estimate.high + 1e-12 <= 1.0 + 2e-12


def test_a_clear_improvement_excludes_zero_and_noise_does_not() -> None:
    better = paired_difference([0.0] * 60 + [1.0] * 40, [1.0] * 30 + [0.0] * 30 + [1.0] * 40)
    assert better.mean == pytest.approx(0.3)
    assert better.low > 0.15
    same = paired_difference([0.0, 1.0] * 50, [1.0, 0.0] * 50)
    assert same.low < 0 < same.high


def test_a_paired_comparison_needs_the_same_tasks() -> None:
    with pytest.raises(ValueError, match="same ones"):
        paired_difference([1.0], [1.0, 0.0])


def test_the_sign_test_has_the_textbook_values() -> None:
    assert sign_greater(0, 0) == sign_greater(0, 7) == 1.0
    assert sign_greater(4, 0) == 1 / 16 and sign_greater(0, 4) == 1.0
    assert sign_greater(9, 1) == pytest.approx(11 / 1024)
