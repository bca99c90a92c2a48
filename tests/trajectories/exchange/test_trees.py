"""What search trees give to preference and value training."""

from __future__ import annotations

import pytest
from searched_episode import searched

from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError
from openhands_rl_plugin.trajectories.exchange.formats import SMALLEST_MARGIN, preference_rows


async def test_siblings_become_pairs_of_the_best_and_the_worst():
    trajectory = await searched(3)
    pairs = list(preference_rows(trajectory, ()))
    assert pairs
    for pair in pairs:
        assert pair["margin"] >= SMALLEST_MARGIN and pair["chosen"] != pair["rejected"]
        assert pair["prompt"][-1]["role"] == "user" and pair["chosen"][0]["role"] == "assistant"
        assert pair["instance_id"] == "plan" and pair["run_id"] == "run" and pair["trajectory_id"] == "searched"


def test_an_episode_without_a_search_has_none():
    with pytest.raises(LeftOutError):
        list(preference_rows(example_trajectory(0), ()))
