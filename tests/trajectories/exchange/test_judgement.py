"""What counts as an episode's outcome when several have judged it."""

from __future__ import annotations

from openhands_rl_plugin.core.judgements import resolved, score_of
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.testing import example_trajectory

EPISODE = example_trajectory(0)


def judged(version: str, reward: float, **detail: bool) -> Score:
    return Score(trajectory_id=EPISODE.id, reward=reward, reward_version=version, detail=dict(detail))


def test_the_newest_outcome_counts_and_an_opinion_is_none() -> None:
    tests, opinion = judged("tests-1", 1.0, resolved=True), judged("verifier-1@0123456789abcdef/512", 0.02)
    assert (score_of(EPISODE, (tests, opinion)), resolved(EPISODE, (tests, opinion))) == (1.0, True)
    assert score_of(EPISODE, (opinion,)) == EPISODE.known_return
    later = judged("tests-2", 0.0, resolved=False)
    assert (score_of(EPISODE, (tests, later)), resolved(EPISODE, (tests, later))) == (0.0, False)


def test_a_persons_verdict_comes_before_the_graders_report() -> None:
    graded = example_trajectory().model_copy(update={"evidence": {"report": {"resolved": True}}})
    verdict = Score(trajectory_id=graded.id, reward=0.0, reward_version="verdict-1")
    assert resolved(graded, ()) is True and resolved(graded, [verdict]) is False
    withdrawn = verdict.model_copy(update={"reward": None})
    assert resolved(graded, [verdict, withdrawn]) is True
