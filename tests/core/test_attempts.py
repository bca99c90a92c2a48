"""Pass@k and Best@k against the definition: the mean over all subsets of k attempts."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.core.statistics import best_at_k, over_tasks, pass_at_k

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


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.data())
def test_a_perfect_verifier_reaches_pass_at_k_and_a_blind_one_the_mean(
    outcomes: list[bool], data: st.DataObject
) -> None:
    n, k = len(outcomes), data.draw(st.integers(1, len(outcomes)))
    assert best_at_k([float(outcome) for outcome in outcomes], outcomes, k) == pytest.approx(
        pass_at_k(n, sum(outcomes), k)
    )
    assert best_at_k([0.5] * n, outcomes, k) == pytest.approx(sum(outcomes) / n)


def test_pass_at_k_of_many_attempts_is_exact() -> None:
    assert pass_at_k(200, 100, 1) == 0.5
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    assert pass_at_k(5, 4, 2) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1), (0, 0, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"attempts"):
        pass_at_k(n, c, k)


def test_scores_that_name_no_best_attempt_are_refused() -> None:
    with pytest.raises(ValueError, match="not a number"):
        best_at_k([0.1, math.nan], [1, 0], 1)
    with pytest.raises(ValueError, match="2 scores for 1 outcomes"):
        best_at_k([0.1, 0.2], [1], 1)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = random.Random(7)
    covered = 0
    for trial in range(100):
        found = over_tasks([generator.betavariate(2, 3) for _ in range(60)], repeats=400, seed=trial)
        covered += found.low <= 2 / 5 <= found.high
    assert 88 <= covered <= 99


def test_the_interval_is_repeatable_and_of_one_task_says_nothing() -> None:
    values = [at * at / 400 for at in range(20)]
    assert over_tasks(values) == over_tasks(values)
    assert over_tasks(values, seed=1) != over_tasks(values, seed=0)
    assert (over_tasks([0.4]).low, over_tasks([0.4]).high) == (0.0, 1.0)
