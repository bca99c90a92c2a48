"""Budgets hold for what is done side by side, and nothing goes on behind a search that ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from search_worlds import CountedWorld, SeededEngine, opened, planning, report

from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, JsonObject, Message
from openhands_rl_plugin.rollout.strategies.base import BestOfNStrategy, ToTStrategy
from openhands_rl_plugin.rollout.strategies.mcts import MCTSStrategy
from openhands_rl_plugin.rollout.strategies.search import SearchBudget
from openhands_rl_plugin.rollout.strategies.value import NoValue, RolloutValue

pytestmark = pytest.mark.contract


def spent(tree: EpisodeTree, chosen: int) -> JsonObject:
    turn = report(tree, chosen)["turn"]
    assert isinstance(turn, dict)
    return turn


def searches(**budget: float) -> list[Strategy]:
    turn_budget = SearchBudget.model_validate(budget)
    return [
        BestOfNStrategy(n=5, value=RolloutValue(), turn_budget=turn_budget),
        ToTStrategy(num_branches=8, depth=3, beam=8, value=NoValue(), turn_budget=turn_budget),
        MCTSStrategy(num_simulations=64, parallel=16, turn_budget=turn_budget),
    ]


@pytest.mark.parametrize("bound", ["calls", "steps"])
async def test_branches_side_by_side_keep_to_a_bound_together(bound: str):
    for strategy in searches(**{bound: 11}):
        world = CountedWorld()
        tree = await opened(world)
        chosen = await strategy.decide(tree, SeededEngine(ways=64), world)
        assert spent(tree, chosen)[bound] == 11, strategy
        assert sum(twin.steps_taken for twin in world.opened) == spent(tree, chosen)["steps"]
        assert tree.usage.calls == spent(tree, chosen)["calls"]


class Hanging(SeededEngine):
    """Its first call takes half a minute."""

    async def complete(self, messages: Sequence[Message], **asked: Any) -> list[Completion]:
        if not self.asked:
            self.asked.append(None)
            await asyncio.sleep(30)
        return await super().complete(messages, **asked)


@pytest.mark.parametrize("account", ["turn", "episode"])
async def test_a_call_is_given_up_when_the_seconds_are_over(account: str):
    for strategy in (
        BestOfNStrategy(n=2, value=NoValue(), **{f"{account}_budget": SearchBudget(seconds=0.2)}),
        MCTSStrategy(num_simulations=9, **{f"{account}_budget": SearchBudget(seconds=0.2)}),
    ):
        world = planning()
        tree = await opened(world)
        started = time.monotonic()
        chosen = await strategy.decide(tree, Hanging(), world)
        assert time.monotonic() - started < 10
        told = report(tree, chosen)
        assert told["cut_by"] == ("seconds" if account == "turn" else "episode seconds")
        assert len(tree.children(tree.head)) == 1, "one plain completion, because every turn needs an action"
