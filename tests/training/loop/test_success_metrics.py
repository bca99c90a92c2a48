"""What a stage says of its episodes: a failure, a missing reward and a zero are three things."""

from __future__ import annotations

from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.training.loop.plan import success_metrics


def test_failed_and_unscored_episodes_are_counted_apart_and_are_no_zeros() -> None:
    played = [example_trajectory(at) for at in range(4)]
    figures = success_metrics(played, [1.0, None, 0.0, None], lambda _, reward: reward >= 0.999)
    assert (figures["failed"], figures["unscored"], figures["successes"]) == (1.0, 1.0, 1.0)
    assert (figures["success"], figures["reward"]) == (0.5, 0.5)
    nothing = success_metrics(played, [None] * 4, lambda _, reward: reward >= 0.999)
    assert (nothing["failed"], nothing["unscored"]) == (1.0, 3.0)
    assert "success" not in nothing and "reward" not in nothing
