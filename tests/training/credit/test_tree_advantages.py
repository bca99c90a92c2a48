"""What a search tree teaches beyond the path that was acted on."""

from __future__ import annotations

import pytest
from searched_episode import searched

from openhands_rl_plugin.training.credit.advantages import (
    environment_rewards,
    search_rewards,
    sibling_advantages,
    step_advantages,
    times_sampled,
)
from openhands_rl_plugin.training.data.batch import samples_of, samples_of_tree


async def test_siblings_are_compared_with_what_their_state_was_worth():
    trajectory = await searched()
    advantages = sibling_advantages(trajectory)
    assert len(advantages) > 3
    for parent in {trajectory.nodes[at].parent for at in advantages}:
        members = [at for at in advantages if trajectory.nodes[at].parent == parent]
        times = times_sampled(trajectory)
        weighted = sum(max(trajectory.nodes[at].visits, times[at]) * advantages[at] for at in members)
        assert weighted == pytest.approx(0.0, abs=1e-9)
        best = max(members, key=lambda at: trajectory.nodes[at].value or 0.0)
        assert advantages[best] == max(advantages[at] for at in members)
    assert all(trajectory.nodes[at].visits >= 5 for at in sibling_advantages(trajectory, least_visits=5))


async def test_every_node_of_a_tree_is_trained_once_with_its_own_advantage():
    trajectory = await searched()
    advantages = sibling_advantages(trajectory)
    samples = samples_of_tree(trajectory, advantages)
    wanted = sum(
        len(node.tokens.sampled_ids) for at, node in enumerate(trajectory.nodes) if at in advantages and node.tokens
    )
    assert sum(sum(sample.mask) for sample in samples) == wanted
    found = sorted(
        sample.advantage_at(position) for sample in samples for position, trained in enumerate(sample.mask) if trained
    )
    expected = sorted(
        advantages[at]
        for at, node in enumerate(trajectory.nodes)
        if at in advantages and node.tokens
        for _ in node.tokens.sampled_ids
    )
    assert found == pytest.approx(expected)
    assert any(sample.token_advantages for sample in samples)


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
