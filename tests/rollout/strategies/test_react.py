from __future__ import annotations

import pytest

from openhands_rl_plugin.core.errors import ModelError
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Message, Observation, SamplingParams
from openhands_rl_plugin.rollout.strategies.base import ReActOptions, StandardReActStrategy
from openhands_rl_plugin.testing import ScriptedEngine, check_strategy


def tree_at(text: str) -> EpisodeTree:
    tree = EpisodeTree()
    tree.observe(Observation(messages=(Message(role="user", content=text),)))
    return tree


async def test_it_keeps_the_rules_of_strategies():
    await check_strategy(StandardReActStrategy())


async def test_one_completion_a_turn_of_the_whole_conversation():
    tree, engine = tree_at("start"), ScriptedEngine(["first", "second"])
    strategy = StandardReActStrategy()
    for turn in range(2):
        chosen = await strategy.decide(tree, engine, None)
        tree.commit(chosen)
        tree.observe(Observation(messages=(Message(role="user", content=f"state {turn}"),)))
    assert [[message.content for message in call] for call in engine.calls] == [
        ["start"],
        ["start", "first", "state 0"],
    ]
    assert tree.turns == 2


async def test_its_sampling_is_what_is_asked_for_and_recorded():
    tree = tree_at("start")
    sampling = SamplingParams(temperature=0.3, max_tokens=5)
    strategy = StandardReActStrategy(ReActOptions(sampling=sampling))
    chosen = await strategy.decide(tree, ScriptedEngine(["go"]), None)
    assert tree.nodes[chosen].sampling == sampling


async def test_an_engine_that_fails_leaves_the_tree_as_it_was():
    tree = tree_at("start")
    with pytest.raises(ModelError, match="the script is over after 0 answers"):
        await StandardReActStrategy().decide(tree, ScriptedEngine([]), None)
    assert (len(tree.nodes), tree.head) == (1, 0)
