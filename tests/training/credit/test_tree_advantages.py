"""What a search tree teaches beyond the path that was acted on."""

from __future__ import annotations

import pytest
from searched_episode import searched

from openhands_rl_plugin.training.credit.credit import (
    environment_rewards,
    search_rewards,
    step_advantages,
)
from openhands_rl_plugin.training.data.batch import samples_of, samples_of_tree


async def test_a_tree_with_one_advantage_is_the_same_as_its_path():
    trajectory = await searched()
    acted = {at: 0.5 for at in trajectory.path() if trajectory.nodes[at].sampled}
    path, tree = samples_of(trajectory, 0.5), samples_of_tree(trajectory, acted)
    assert [(s.input_ids, s.mask, s.advantage) for s in tree if True in s.mask] == [
        (s.input_ids, s.mask, s.advantage) for s in path
    ]


async def test_step_rewards_from_search_add_up_to_the_return():
    trajectory = await searched()
    rewards = search_rewards(trajectory)
    assert sum(rewards.values()) == pytest.approx(trajectory.episode_return)
    assert rewards != pytest.approx(environment_rewards(trajectory))
    paid = environment_rewards(trajectory)
    to_go = step_advantages(trajectory, paid)
    first = min(to_go)
    assert to_go[first] == pytest.approx(trajectory.episode_return)
    halves = step_advantages(trajectory, dict.fromkeys(paid, 1.0), discount=0.5)
    assert sorted(halves.values()) == pytest.approx([1.0, 1.5, 1.75])
