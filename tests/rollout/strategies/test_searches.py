"""What all searching strategies keep to: budgets, failures, merging, reports, and nothing but forks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from one_episode import one_episode
from search_worlds import (
    TASK,
    EveryWayEngine,
    FragileWorld,
    SeededEngine,
    UnforkableWorld,
    opened,
    planning,
    report,
    ways_of,
)

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import CaughtFailure, ModelError
from openhands_rl_plugin.core.protocols import LLMEngine, Strategy
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, FailureKind, Limits, Message, StopReason, Tokens, Trajectory
from openhands_rl_plugin.rollout.strategies.base import BestOfNOptions, BestOfNStrategy, ToTOptions, ToTStrategy
from openhands_rl_plugin.rollout.strategies.mcts import MCTSOptions, MCTSStrategy
from openhands_rl_plugin.rollout.strategies.search import SearchBudget, SearchOptions
from openhands_rl_plugin.rollout.strategies.value import ModelValue, NoValue, RewardValue
from openhands_rl_plugin.testing import ScriptedEngine, check_strategy

Make = Callable[..., Strategy]


def best_of_n(**changes: object) -> Strategy:
    return BestOfNStrategy(BestOfNOptions.model_validate({"value": "rollout", "n": 4, **changes}))


def tot(**changes: object) -> Strategy:
    return ToTStrategy(ToTOptions.model_validate({"value": "none", "num_branches": 4, "depth": 3, **changes}))


def mcts(**changes: object) -> Strategy:
    return MCTSStrategy(MCTSOptions.model_validate({"num_simulations": 30, **changes}))


EVERY = pytest.mark.parametrize("make", [best_of_n, tot, mcts], ids=["BestOfN", "ToT", "MCTS"])


@EVERY
async def test_they_keep_the_rules_of_strategies(make: Make):
    turns = iter(["down", "right", "left"] * 5000)
    await check_strategy(make(), engine=ScriptedEngine(lambda messages: next(turns)))


@EVERY
async def test_the_tokens_of_a_turn_are_bounded(make: Make):
    tree = await opened(world := planning())
    chosen = await make(turn_budget=SearchBudget(tokens=900)).decide(tree, SeededEngine(), world)
    info: Any = report(tree, chosen)
    assert info["turn"]["tokens"] < 900 + 8 * 200 and info["cut_by"] == ("tokens" if make is mcts else info["cut_by"])


@EVERY
async def test_a_spent_episode_budget_leaves_plain_turns(make: Make):
    world = planning()
    tree = await opened(world)
    engine = SeededEngine()
    strategy = make(episode_budget=SearchBudget(calls=8))
    calls = []
    while not tree.terminated:
        before = len(engine.calls)
        chosen = await strategy.decide(tree, engine, world)
        calls.append(len(engine.calls) - before)
        tree.commit(chosen)
        tree.observe(await world.step(tree.action))
    assert all(count <= 1 for count in calls[2:])
    assert report(tree, chosen)["cut_by"] == "episode calls"


@EVERY
async def test_a_branch_that_dies_is_dropped_and_counted(make: Make):
    world = FragileWorld()
    world.deadly = frozenset({"1", "2"})
    tree = await opened(world)
    chosen = await make().decide(tree, EveryWayEngine(), world)
    info = report(tree, chosen)
    assert isinstance(info["dropped"], int) and info["dropped"] >= 1
    assert tree.nodes[chosen].message.content in ("0", "3")
    dead = [node for node in tree.nodes if "dropped" in str(node.metadata)]
    assert all(
        "the server of this fork is gone" in str(node.metadata) for node in dead if node.sampled and node.reward is None
    )


@EVERY
async def test_when_all_branches_are_dead_the_episode_has_a_typed_failure(make: Make):
    world = FragileWorld()
    world.deadly = frozenset("0123")
    with pytest.raises(CaughtFailure, match=r"all \d+ branches of the search died; the last: .*is gone") as caught:
        await make().decide(await opened(world), EveryWayEngine(), world)
    assert caught.value.failure.kind is FailureKind.INFRASTRUCTURE


async def test_equal_actions_become_one_node_and_all_are_counted():
    world = planning()
    tree = await opened(world)
    engine = ScriptedEngine(["1", " 1 ", "2", "1"])
    chosen = await best_of_n(value="none").decide(tree, engine, world)
    assert [tree.nodes[at].message.content for at in tree.children(tree.head)] == ["1", "2"]
    assert report(tree, chosen)["merged"] == 2 and tree.usage.calls == 4
    assert tree.nodes[tree.children(tree.head)[0]].metadata["search"]["merged"] == 2


class Sure(ScriptedEngine):
    """Proposes 0, 1, 2 and judges them; every token it says has a probability of 0.9."""

    VERDICTS: ClassVar = {"0": "No", "1": "Yes", "2": "maybe"}

    def __init__(self) -> None:
        proposals = iter("012")
        super().__init__(lambda messages: self._verdict(messages) or next(proposals))

    async def complete(self, messages: Sequence[Message], **asked: Any) -> list[Completion]:
        completions = await super().complete(messages, **asked)
        return [each.model_copy(update={"tokens": self._surely(each)}) for each in completions]

    def _verdict(self, messages: Sequence[Message]) -> str | None:
        asked = "Yes or No" in (messages[-1].content or "")
        return self.VERDICTS[messages[-2].content or ""] if asked else None

    def _surely(self, completion: Completion) -> Tokens:
        assert completion.tokens is not None
        sampled = len(completion.tokens.sampled_ids)
        return Tokens.of(completion.tokens.prompt_ids, completion.tokens.sampled_ids, (math.log(0.9),) * sampled)


@pytest.mark.parametrize("strategy", [BestOfNStrategy(n=3), ToTStrategy(num_branches=3)], ids=["BestOfN", "ToT"])
async def test_without_forks_the_model_itself_judges(strategy: Strategy):
    tree = await opened(planning())
    chosen = await strategy.decide(tree, Sure(), None)
    assert tree.nodes[chosen].message.content == "1"
    values = {tree.nodes[at].message.content: tree.nodes[at].value for at in tree.children(tree.head)}
    assert values == {"0": pytest.approx(0.1), "1": pytest.approx(0.9), "2": pytest.approx(0.5)}
    assert tree.usage.calls == 6


@pytest.mark.parametrize("make", [BestOfNStrategy, ToTStrategy])
async def test_in_a_turn_in_which_forks_are_refused_it_is_judged_without(make: Make):
    world = UnforkableWorld()
    strategy = make(value=ModelValue())
    tree = await opened(world)
    reasons: list[object] = []
    for refused in (True, True, False):
        world.refused = refused
        chosen = await strategy.decide(tree, EveryWayEngine(), world)
        info = report(tree, chosen)
        reasons.append(info.get("without_forks"))
        assert info["dropped"] == 0 and tree.nodes[chosen].visits and bool(world.forks) is not refused
        tree.commit(chosen)
        tree.observe(await world.step(tree.action))
    assert reasons == ["BadEnvironmentError: it cannot be forked while processes run"] * 2 + [None]


async def test_tot_finds_what_a_greedy_choice_misses():
    wins = 0
    for seed in range(20):
        world = planning(seed, depth=3, branching=3)
        tree = await opened(world)
        options = ToTOptions(num_branches=3, depth=3, beam=9, value="none")
        while not tree.terminated:
            tree.commit(await ToTStrategy(options).decide(tree, EveryWayEngine(), world))
            tree.observe(await world.step(tree.action))
        wins += world.earned == pytest.approx(world.optimum)
    assert wins == 20, "a beam as wide as the tree is an exhaustive search"


async def test_the_registry_makes_strategies_with_their_values():
    strategy = registry.build("strategies", "MCTS", {"value": "reward", "value_options": {"reward": "return"}})
    assert isinstance(strategy, MCTSStrategy) and isinstance(strategy._value, RewardValue)
    world = planning()
    tree = await opened(world)
    chosen = await strategy.decide(tree, SeededEngine(), world)
    assert tree.nodes[chosen].visits > 0
    assert isinstance(registry.build("strategies", "ToT", {"value": "none"})._value, NoValue)
    assert isinstance(registry.build("strategies", "BestOfN")._value, ModelValue)


@pytest.mark.parametrize("kind", [BestOfNOptions, ToTOptions, MCTSOptions])
def test_every_option_is_in_the_example_of_a_configuration(kind: type[SearchOptions]):
    example = (Path(__file__).parents[3] / "config.toml.example").read_text()
    section = example.partition("[rl.strategy]")[2].partition("\n[")[0]
    assert [name for name in kind.model_fields if f"\n# {name} = " not in section] == []


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
    info = report(tree, chosen)
    assert tree.nodes[chosen].parent == tree.head
    assert isinstance(info["dropped"], int) and info["dropped"] >= 1
    assert info["last_failure"] == "ModelError: the prompt is too long for the model"
    dropped = [node for node in tree.nodes if "dropped" in node.metadata.get("search", {})]
    assert len(dropped) == info["dropped"] and all(node.sampled for node in dropped)


@EVERY
async def test_no_search_goes_beyond_the_last_turn(make: Make):
    turns = 2
    trajectory = await play(make(), SeededEngine(), Limits(max_turns=turns))
    assert trajectory.stop is StopReason.MAX_TURNS and trajectory.failure is None
    tree = EpisodeTree.thaw(trajectory)
    assert max(len(way) for way in ways_of(tree)) == turns
    best = max(value for visits, value in ways_of(tree).values() if value is not None)
    assert best <= turns / 4, "nothing is counted that cannot be earned any more"
