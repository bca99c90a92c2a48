"""Budgets hold for what is done side by side, and nothing goes on behind a search that ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from search_worlds import CountedWorld, EveryWayEngine, FragileWorld, SeededEngine, opened, planning, report

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, SamplingParams
from openhands_rl_plugin.models.engines.seeded import SeededEngine as EpisodeEngine
from openhands_rl_plugin.rollout.strategies.base import BestOfNStrategy, ToTStrategy
from openhands_rl_plugin.rollout.strategies.mcts import MCTSStrategy
from openhands_rl_plugin.rollout.strategies.options import SearchBudget
from openhands_rl_plugin.rollout.strategies.value import NoValue, RolloutValue
from openhands_rl_plugin.testing import ScriptedEngine

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


async def test_what_is_sampled_at_once_is_not_stepped_beyond_the_bound():
    world = CountedWorld()
    tree = await opened(world)
    wide = {"num_simulations": 32, "parallel": 32, "first_branches": 32, "num_branches": 32}
    strategy = MCTSStrategy(**wide, value=NoValue(), turn_budget=SearchBudget(steps=5))
    chosen = await strategy.decide(tree, EveryWayEngine(), world)
    assert spent(tree, chosen)["steps"] == 5 and report(tree, chosen)["cut_by"] == "steps"
    assert sum(tree.nodes[at].visits for at in tree.children(tree.head)) == 5


async def test_the_way_back_to_a_state_counts_as_steps():
    world = CountedWorld()
    tree = await opened(world)
    budget = SearchBudget(steps=40)
    strategy = MCTSStrategy(num_simulations=200, open_worlds=1, value=NoValue(), turn_budget=budget)
    chosen = await strategy.decide(tree, SeededEngine(), world)
    taken = sum(twin.steps_taken for twin in world.opened)
    assert 30 < taken == spent(tree, chosen)["steps"] <= 40


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


async def test_a_step_is_given_up_when_the_seconds_are_over_and_is_not_the_branchs_fault():
    world = FragileWorld()
    world.slow, world.pause = frozenset("0123"), 30.0
    tree = await opened(world)
    strategy = BestOfNStrategy(n=4, value=NoValue(), turn_budget=SearchBudget(seconds=0.05))
    started = time.monotonic()
    chosen = await strategy.decide(tree, EveryWayEngine(), world)
    assert time.monotonic() - started < 10
    told = report(tree, chosen)
    assert (told["dropped"], told["cut_by"]) == (0, "seconds")


async def test_an_episodes_seconds_are_those_of_its_searches_and_not_what_passes_between_them():
    world = planning()
    tree = await opened(world)
    strategy = BestOfNStrategy(n=2, value=NoValue(), episode_budget=SearchBudget(seconds=1.0))
    searched = 0.0
    for _ in range(3):
        chosen = await strategy.decide(tree, EveryWayEngine(), world)
        tree.commit(chosen)
        tree.observe(await world.step(tree.action))
        told, turn = report(tree, chosen), spent(tree, chosen)
        assert told["cut_by"] is None and turn["calls"] == 2
        searched += float(str(turn["seconds"]))
        episode = told["episode"]
        assert isinstance(episode, dict) and episode["seconds"] == pytest.approx(searched, abs=0.001)
        await asyncio.sleep(0.6)


class Failing(SeededEngine):
    """The server goes away at the tenth call."""

    async def complete(self, messages: Sequence[Message], **asked: Any) -> list[Completion]:
        if len(self.asked) == 9:
            self.asked.append(None)
            raise InfrastructureError("the model is away") from OSError("no route")
        return await super().complete(messages, **asked)


async def test_a_failure_ends_all_that_goes_on_beside_it_and_leaves_no_fork():
    for strategy in searches():
        world = CountedWorld()
        tree = await opened(world)
        engine = Failing(ways=64)
        with pytest.raises(InfrastructureError, match="the model is away") as caught:
            await strategy.decide(tree, engine, world)
        assert isinstance(caught.value.__cause__, OSError), "the host looks at it"
        asked, known, forks = len(engine.asked), len(tree.nodes), len(world.opened)
        assert forks and world.left_open == 0
        await asyncio.sleep(0.05)
        assert (len(engine.asked), len(tree.nodes), len(world.opened)) == (asked, known, forks)


async def test_who_is_stopped_leaves_no_fork_either():
    for strategy in searches():
        world = CountedWorld()
        tree = await opened(world)
        search = asyncio.ensure_future(strategy.decide(tree, SeededEngine(ways=64), world))
        while not world.opened:
            await asyncio.sleep(0)
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
        assert world.left_open == 0


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("BestOfN", {"n": 4, "value": "none", "turn_budget": {"calls": 3}}, "too small for one move of BestOfN.* 4"),
        ("BestOfN", {"n": 4, "turn_budget": {"calls": 7}}, "turn_budget.calls: 7 is too small .* takes 8: raise it"),
        ("ToT", {"num_branches": 3, "value": "none", "turn_budget": {"calls": 2}}, "one move of ToT, which takes 3"),
        ("BestOfN", {"n": 4, "value": "rollout", "turn_budget": {"calls": 7}}, r"turn_budget.calls: 7 is .* takes 8"),
        ("BestOfN", {"n": 4, "value": "none", "turn_budget": {"steps": 3}}, r"turn_budget.steps: 3 is .* takes 4"),
        ("ToT", {"num_branches": 3, "value": "rollout", "turn_budget": {"calls": 5}}, "ToT, which takes 6"),
        ("ToT", {"num_branches": 3, "value": "rollout", "episode_budget": {"steps": 5}}, "episode_budget.steps: 5"),
        ("MCTS", {"turn_budget": {"calls": 2}}, "one move of MCTS, which takes 3"),
        ("MCTS", {"turn_budget": {"steps": 1}}, "one move of MCTS, which takes 2"),
        ("MCTS", {"first_branches": 3, "value": "model", "episode_budget": {"calls": 3}}, "episode_budget.calls.* 4"),
        ("MCTS", {"turn_budget": {"seconds": 1e-9}}, "turn_budget.seconds: must be greater than or equal to 0.001"),
        ("MCTS", {"turn_budget": {"steps": 0}}, "turn_budget.steps: must be greater than or equal to 1"),
    ],
)
def test_a_budget_too_small_for_one_move_is_refused(name: str, options: JsonObject, says: str):
    with pytest.raises(ConfigError, match=says):
        registry.build("strategies", name, options)


@pytest.mark.parametrize(
    ("name", "options", "calls"),
    [
        ("BestOfN", {"n": 4, "value": "none"}, 4),
        ("BestOfN", {"n": 4}, 8),
        ("MCTS", {"first_branches": 5, "num_branches": 1, "value": "reward"}, 1),
        ("MCTS", {"first_branches": 5, "num_branches": 1}, 2),
    ],
)
def test_a_budget_that_just_suffices_is_taken(name: str, options: JsonObject, calls: int):
    built = registry.build("strategies", name, {**options, "turn_budget": {"calls": calls}})
    assert built.options.turn_budget == SearchBudget(calls=calls)
    if calls > 1:
        with pytest.raises(ConfigError, match=f"which takes {calls}"):
            registry.build("strategies", name, {**options, "turn_budget": {"calls": calls - 1}})


def test_a_value_that_is_given_asks_nothing():
    assert BestOfNStrategy(n=4, value=NoValue(), turn_budget=SearchBudget(calls=4)).options.n == 4
    with pytest.raises(ConfigError, match="which takes 4"):
        BestOfNStrategy(n=4, value=NoValue(), turn_budget=SearchBudget(calls=3))


class Echo(ScriptedEngine):
    """Notes the seeds that it is asked with."""

    def __init__(self) -> None:
        super().__init__(lambda messages: "x")
        self.seeds: dict[str, list[int | None]] = {}

    async def complete(self, messages: Sequence[Message], **asked: Any) -> list[Completion]:
        sampling = asked["sampling"]
        assert isinstance(sampling, SamplingParams)
        self.seeds.setdefault(str(messages[-1].content), []).append(sampling.seed)
        return await super().complete(messages, **asked)


async def test_an_episodes_seeds_follow_from_what_is_asked_and_not_from_when():
    said = [Message(role="user", content=word) for word in "abc"]
    notes: list[dict[str, list[int | None]]] = []
    # An episode begins with its opening, whose first answer has the seed itself.
    for order in ([0, 1, 2, 0], [0, 2, 0, 1]):
        echo = Echo()
        engine = EpisodeEngine(echo, SamplingParams(), 5)
        for at in order:
            await engine.complete([said[at]])
        notes.append(echo.seeds)
    assert notes[0] == notes[1] and notes[0]["a"][0] == 5
    seeds = [seed for each in notes[0].values() for seed in each]
    assert len(set(seeds)) == 4 and all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    unseeded = Echo()
    await EpisodeEngine(unseeded, SamplingParams(), None).complete([said[0]])
    assert unseeded.seeds == {"a": [None]}
