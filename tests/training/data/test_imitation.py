"""Which episodes are select_for_sft, and which pairs are preferences."""

from __future__ import annotations

from credited_episodes import episode, settings
from searched_episode import searched

from openhands_rl_plugin.training.data.dataset import preference_pairs, select_for_sft

PLAYED = [episode(0, 1.0), episode(1, 1.0), episode(2, 0.0), episode(3, 0.5, group="b"), episode(4, 0.2, group="b")]
REWARDS = [1.0, 1.0, 0.0, 0.5, 0.2]


def test_all_successes_are_imitated_or_the_best_of_a_task() -> None:
    assert select_for_sft(PLAYED, REWARDS, settings(algorithm="sft")) == (0, 1, 3, 4)
    assert select_for_sft(PLAYED, REWARDS, settings(algorithm="sft", imitate_above=0.5)) == (0, 1)
    assert select_for_sft(PLAYED, REWARDS, settings(algorithm="sft", imitate_above=-1.0)) == (0, 1, 2, 3, 4)
    best = settings(algorithm="rejection-sampling")
    assert select_for_sft(PLAYED, REWARDS, best) == (0, 3), "the shorter one of two equally good ones"
    assert select_for_sft(PLAYED, REWARDS, best.model_copy(update={"keep_best": 2})) == (0, 1, 3, 4)


def test_the_best_is_paired_with_the_worst() -> None:
    chosen = settings(algorithm="dpo")
    pairs = preference_pairs(PLAYED, REWARDS, chosen)
    names = [(pair.chosen[0].trajectory_id, pair.rejected[0].trajectory_id) for pair in pairs]
    assert names == [("0", "2"), ("3", "4")]
    assert preference_pairs(PLAYED[:2], REWARDS[:2], chosen) == [], "equally good"
    four = [episode(number, float(number)) for number in range(5)]
    pairs = preference_pairs(four, [float(number) for number in range(5)], chosen)
    assert [(p.chosen[0].trajectory_id, p.rejected[0].trajectory_id) for p in pairs] == [("4", "0"), ("3", "1")]


async def test_siblings_of_a_tree_are_pairs_with_one_context() -> None:
    trajectory = await searched()
    pairs = preference_pairs([trajectory], [1.0], settings(algorithm="dpo", tree="proposals"))
    assert pairs
    for pair in pairs:
        (better,), (worse,) = pair.chosen, pair.rejected
        start = better.mask.index(True)
        assert worse.mask.index(True) == start and better.input_ids[:start] == worse.input_ids[:start]
        assert sum(better.mask) == len(better.mask) - start, "one action alone is trained"
        values = [trajectory.nodes[sample.leaf].value for sample in (better, worse)]
        assert better.input_ids[start:] != worse.input_ids[start:], values
    assert preference_pairs([trajectory], [1.0], settings(algorithm="dpo")) == []


def test_what_a_person_said_of_two_comes_before_their_rewards() -> None:
    chosen = settings(algorithm="dpo")
    said = {frozenset(("0", "2")): "2", frozenset(("1", "4")): "1", frozenset(("3", "4")): None}
    pairs = preference_pairs(PLAYED, REWARDS, chosen, said)
    names = [(pair.chosen[0].trajectory_id, pair.rejected[0].trajectory_id, pair.said) for pair in pairs]
    assert names == [("2", "0", True), ("1", "4", True)], "also of two groups; nothing where neither is better"
    alone = preference_pairs(PLAYED[:3], [None, None, None], chosen, said)
    assert [(pair.chosen[0].trajectory_id, pair.rejected[0].trajectory_id) for pair in alone] == [("2", "0")]
