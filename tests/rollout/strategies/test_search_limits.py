"""A search looks no further than its episode goes, and a model that refuses a branch does not end the episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from one_episode import one_episode
from search_worlds import TASK, SeededEngine, opened, planning, report, ways_of

from openhands_rl_plugin.core.errors import ModelError
from openhands_rl_plugin.core.protocols import LLMEngine, Strategy
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    Limits,
    Message,
    StopReason,
    Trajectory,
)
from openhands_rl_plugin.rollout.strategies.base import BestOfNStrategy, ToTStrategy
from openhands_rl_plugin.rollout.strategies.mcts import MCTSStrategy
from openhands_rl_plugin.rollout.strategies.value import NoValue, RolloutValue

Make = Callable[[], Strategy]


def best_of_n() -> Strategy:
    return BestOfNStrategy(n=4, value=RolloutValue())


def tot() -> Strategy:
    return ToTStrategy(num_branches=4, depth=4, value=NoValue())


def mcts() -> Strategy:
    return MCTSStrategy(num_simulations=30)


EVERY = pytest.mark.parametrize("make", [best_of_n, tot, mcts], ids=["BestOfN", "ToT", "MCTS"])


class Forgetful(SeededEngine):
    """Refuses a prompt of more than ``longest`` messages."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self._longest = longest

    async def complete(self, messages: Sequence[Message], **asked: Any) -> list[Completion]:
        if len(messages) > self._longest:
            raise ModelError("the prompt is too long for the model")
        return await super().complete(messages, **asked)


async def play(strategy: Strategy, engine: LLMEngine, limits: Limits) -> Trajectory:
    return await one_episode(planning(), engine, TASK, limits=limits, strategy=strategy)


@EVERY
async def test_a_branch_that_the_model_refuses_is_dropped_and_counted(make: Make):
    world = planning()
    tree = await opened(world)
    chosen = await make().decide(tree, Forgetful(len(tree.nodes) + 2), world)
    told = report(tree, chosen)
    assert tree.nodes[chosen].parent == tree.head
    assert isinstance(told["dropped"], int) and told["dropped"] >= 1
    assert told["last_failure"] == "ModelError: the prompt is too long for the model"
    dropped = [node for node in tree.nodes if "dropped" in node.metadata.get("search", {})]
    assert len(dropped) == told["dropped"] and all(node.sampled for node in dropped)


@EVERY
@pytest.mark.parametrize("turns", [2])
async def test_no_search_goes_beyond_the_last_turn(make: Make, turns: int):
    trajectory = await play(make(), SeededEngine(), Limits(max_turns=turns))
    assert trajectory.stop is StopReason.MAX_TURNS and trajectory.failure is None
    tree = EpisodeTree.thaw(trajectory)
    assert max(len(way) for way in ways_of(tree)) == turns
    best = max(value for visits, value in ways_of(tree).values() if value is not None)
    assert best <= turns / 4, "nothing is counted that cannot be earned any more"


@EVERY
async def test_a_resumed_episode_goes_on_with_what_its_budget_has_left(make: Make):
    trajectory = await play(make(), SeededEngine(), Limits(max_turns=2))
    tree = EpisodeTree.thaw(trajectory)
    world = planning()
    await world.reset(TASK)
    acted = [at for at in tree.path() if tree.nodes[at].sampled]
    for at in acted:
        await world.step(tree.nodes[at].message)
    before = report(tree, acted[-1])["episode"]
    chosen = await make().decide(tree, SeededEngine(), world)
    told = report(tree, chosen)
    turn, episode = told["turn"], told["episode"]
    assert isinstance(before, dict) and isinstance(turn, dict) and isinstance(episode, dict)
    for name in ("calls", "tokens", "steps"):
        assert before[name] and episode[name] == before[name] + turn[name]
    assert episode["seconds"] == pytest.approx(before["seconds"] + turn["seconds"], abs=0.001)
