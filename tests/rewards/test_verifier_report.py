"""Ranking and calibration against their definitions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.config.rl import VerifierSettings
from openhands_rl_plugin.rewards.verifier.card import (
    Calibration,
    ScoredEpisode,
    auc,
    fitted,
    report_of,
    sigmoid,
)

PAIRS = st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.5, 0.55, 1.0]), st.booleans()), min_size=1, max_size=20)


def drawn(count: int, *, slope: float, offset: float, seed: int = 0) -> list[ScoredEpisode]:
    """Outcomes that come true as ``sigmoid(slope * margin + offset)`` says; four attempts a task."""
    source = random.Random(seed)
    margins = [source.gauss(0.0, 3.0) for _ in range(count)]
    return [
        ScoredEpisode(f"task-{at // 4}", margin, source.random() < sigmoid(slope * margin + offset))
        for at, margin in enumerate(margins)
    ]


@given(PAIRS)
def test_auc_is_the_share_of_pairs_that_are_ranked_rightly(pairs: list[tuple[float, bool]]) -> None:
    good = [score for score, success in pairs if success]
    bad = [score for score, success in pairs if not success]
    found = auc([score for score, _ in pairs], [success for _, success in pairs])
    if not good or not bad:
        assert found is None
    else:
        wins = sum((left > right) + 0.5 * (left == right) for left in good for right in bad)
        assert found == pytest.approx(wins / (len(good) * len(bad)))


@pytest.mark.parametrize(
    ("method", "slope", "offset"), [("temperature", 0.4, 0.0), ("platt", 0.4, -1.5), ("platt", 2.0, 1.0)]
)
def test_the_calibration_that_was_drawn_from_is_found(method: str, slope: float, offset: float) -> None:
    judged = drawn(800, slope=slope, offset=offset)
    settings = VerifierSettings.model_validate({"calibration": method})
    found = fitted(judged, settings)
    assert found.slope == pytest.approx(slope, rel=0.2) and found.offset == pytest.approx(offset, abs=0.3)
    report = report_of(judged, settings)
    assert report.brier < report.raw_brier
    assert report.calibration == found
    assert fitted(judged[:49], settings) == Calibration() != fitted(judged[:50], settings), "two parameters of so few"
    assert (few := report_of(judged[:60], settings)).brier != few.raw_brier, "by the other half, however few"


def test_selection_lies_between_chance_and_the_best_possible() -> None:
    report = report_of(drawn(200, slope=1.0, offset=-1.0), VerifierSettings())
    assert [one.k for one in report.selection] == [2, 4]
    for one in report.selection:
        assert one.mean.mean < one.best_at_k.mean <= one.pass_at_k.mean
        assert one.mean.n == 50 and one.best_at_k.low <= one.best_at_k.mean <= one.best_at_k.high
    assert report.auc is not None and report.auc.low < report.auc.mean < report.auc.high
    assert report.as_floats()["held_out_auc"] == report.auc.mean
