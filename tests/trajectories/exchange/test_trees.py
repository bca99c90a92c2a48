"""What search trees give to preference and value training."""

from __future__ import annotations

import pytest
from searched_episode import searched

from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError
from openhands_rl_plugin.trajectories.exchange.formats import SMALLEST_MARGIN, preference_rows, value_rows


async def test_siblings_become_pairs_of_the_best_and_the_worst():
    trajectory = await searched(3)
    pairs = list(preference_rows(trajectory, ()))
    assert pairs
    for pair in pairs:
        assert pair["margin"] >= SMALLEST_MARGIN and pair["chosen"] != pair["rejected"]
        assert pair["prompt"][-1]["role"] == "user" and pair["chosen"][0]["role"] == "assistant"
        assert pair["instance_id"] == "plan" and pair["run_id"] == "run" and pair["trajectory_id"] == "searched"


async def test_every_valued_action_is_a_target_with_the_conversation_that_leads_to_it():
    trajectory = await searched(3)
    rows = list(value_rows(trajectory, ()))
    valued = [node for node in trajectory.nodes if node.sampled and node.visits and node.value is not None]
    assert sorted(row["value"] for row in rows) == sorted(node.value for node in valued)
    assert sum(row["on_path"] for row in rows) == 3
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)


def test_an_episode_without_a_search_has_neither():
    for rows in (preference_rows, value_rows):
        with pytest.raises(LeftOutError):
            list(rows(example_trajectory(0), ()))
