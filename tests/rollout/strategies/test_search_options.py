"""What a search makes of ends, values, budgets and forks."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from search_worlds import CountedWorld, EveryWayEngine, SeededEngine, opened, planning, report

from evaluation.performance.search.planning import PlanningEnvironment, PlanningOptions
from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import ConfigError, GraderError
from openhands_rl_plugin.core.protocols import EnvInfo, Strategy
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, Observation, Score, Task, Trajectory
from openhands_rl_plugin.rollout.strategies.base import BestOfNStrategy, ToTStrategy
from openhands_rl_plugin.rollout.strategies.mcts import MCTSStrategy
from openhands_rl_plugin.rollout.strategies.search import SearchBudget
from openhands_rl_plugin.rollout.strategies.value import (
    ModelValue,
    NoValue,
    RewardValue,
    RewardValueOptions,
    RolloutValue,
    ValueFunction,
    VerifierValue,
)
from openhands_rl_plugin.testing import ScriptedEngine

pytestmark = pytest.mark.contract

Make = Callable[[ValueFunction], Strategy]

EVERY = pytest.mark.parametrize(
    "make",
    [
        lambda value: BestOfNStrategy(n=3, value=value),
        lambda value: ToTStrategy(num_branches=3, depth=2, beam=3, value=value),
        lambda value: MCTSStrategy(
            num_simulations=24, first_branches=3, num_branches=3, depth=2, decide_by="value", value=value
        ),
    ],
    ids=["BestOfN", "ToT", "MCTS"],
)


class Desk:
    """A workspace in small: ``finish`` ends, ``fix`` puts things right and ``spoil`` undoes that."""

    info = EnvInfo(emits_rewards=False)
    price = 0.0

    def __init__(self) -> None:
        self.right = False
        self.closed = False
        self.forks: list[Desk] = []

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=(Message(role="user", content="Fix it."),))

    async def step(self, action: Message) -> Observation:
        assert not self.closed
        if action.content == "finish":
            return Observation(terminated=True, reward=self.price)
        self.right = action.content != "spoil" and (self.right or action.content == "fix")
        return Observation(messages=(Message(role="user", content=f"You did {action.content}."),))

    async def evidence(self) -> JsonObject:
        assert not self.closed
        return {"right": self.right}

    async def close(self) -> None:
        self.closed = True

    async def fork(self) -> Desk:
        twin = copy.copy(self)
        self.forks.append(twin)
        return twin


class Shop(Desk):
    """The same, with a reward for the end."""

    info = EnvInfo()
    price = 0.4


class Rightness:
    """A reward that reads the evidence."""

    version = "right-1"

    def __init__(self) -> None:
        self.judged: list[Trajectory] = []

    async def __call__(self, trajectory: Trajectory) -> Score:
        self.judged.append(trajectory)
        reward = float(bool(trajectory.evidence.get("right")))
        return Score(trajectory_id=trajectory.id, reward=reward, reward_version=self.version)


class Worker(ScriptedEngine):
    """Proposes these actions, and is sure that what was ``liked`` last will succeed."""

    def __init__(self, *words: str, liked: str = "") -> None:
        super().__init__([])
        self._words, self._liked = words, liked
        self.questions = 0

    async def complete(self, messages: Sequence[Message], *, n: int = 1, **asked: Any) -> list[Completion]:
        if "Yes or No" in (messages[-1].content or ""):
            self.questions += 1
            last = next(message.content for message in reversed(messages) if message.role == "assistant")
            answers = await ScriptedEngine(["Yes" if last == self._liked else "No"]).complete(messages)
            return [answer.model_copy(update={"tokens": None}) for answer in answers]
        return await ScriptedEngine([self._words[at % len(self._words)] for at in range(n)]).complete(messages, n=n)


async def decided(strategy: Strategy, world: Desk, engine: Worker, turns_left: int | None = None) -> str | None:
    tree = await opened(world)
    tree.turns_left = turns_left
    return tree.nodes[await strategy.decide(tree, engine, world)].message.content


@EVERY
async def test_on_the_last_turn_a_sure_reward_beats_what_looks_promising(make: Make):
    engine = Worker("look", "finish", liked="look")
    assert await decided(make(ModelValue()), Shop(), engine, turns_left=1) == "finish"
    assert engine.questions == 0, "neither has a future to be asked about"


@EVERY
async def test_an_end_is_judged_by_a_reward_with_the_evidence_of_its_fork(make: Make):
    world, reward = Desk(), Rightness()
    world.right = True
    assert await decided(make(RewardValue(reward=reward)), world, Worker("spoil", "finish")) == "finish"
    ends = [judged for judged in reward.judged if judged.nodes[judged.head or 0].message.content == "finish"]
    assert {"right": True} in [end.evidence for end in ends]
    assert world.forks and all(fork.closed for fork in world.forks)


@EVERY
async def test_to_end_is_worse_than_to_go_on_until_all_is_well_and_then_better(make: Make):
    value = RewardValue(RewardValueOptions(unfinished=0.2), reward=Rightness())
    assert await decided(make(value), Desk(), Worker("finish", "spoil")) == "spoil"
    assert await decided(make(value), Desk(), Worker("spoil", "fix")) == "fix"
    done = Desk()
    done.right = True
    assert await decided(make(value), done, Worker("look", "finish")) == "finish"


async def test_what_was_sampled_is_acted_on_as_often_whatever_it_is_worth():
    async def acted(seed: int) -> str | None:
        strategy = BestOfNStrategy(n=4, act="sampled", seed=seed, value=RewardValue(reward=Rightness()))
        return await decided(strategy, Desk(), Worker("spoil", "fix", "spoil", "spoil"))

    first = [await acted(seed) for seed in range(200)]
    assert 120 < first.count("spoil") < 180 and first.count("fix") == 200 - first.count("spoil")
    assert first[:50] == [await acted(seed) for seed in range(50)]


@EVERY
@pytest.mark.parametrize("value", [RolloutValue(), NoValue()], ids=["rollout", "none"])
async def test_values_that_add_up_rewards_are_refused_where_there_are_none(make: Make, value: ValueFunction):
    world = Desk()
    engine = Worker("look")
    expected = f'with value = {value.name!r} .* gives none: set value = "model", "verifier" or "reward" in'
    with pytest.raises(ConfigError, match=expected) as caught:
        await make(value).decide(await opened(world), engine, world)
    assert "\n" not in str(caught.value) and not world.forks


class Liking:
    """A verifier that likes one first move, and cannot judge some."""

    version = "liking-1"

    def __init__(self, liked: str, unknown: str = "", broken: str = "", seconds: float = 0.0) -> None:
        self.liked, self.unknown, self.broken, self.seconds = liked, unknown, broken, seconds

    async def __call__(self, trajectory: Trajectory) -> Score:
        first = next(trajectory.nodes[at] for at in trajectory.path() if trajectory.nodes[at].sampled)
        text = first.message.content or ""
        await asyncio.sleep(self.seconds)
        if text == self.broken:
            raise GraderError("the verifier is away")
        reward = None if text == self.unknown else 0.9 if text == self.liked else 0.0
        return Score(trajectory_id=trajectory.id, reward=reward, reward_version=self.version)


class Unpaid(PlanningEnvironment):
    """No rewards at all."""

    def worth(self, path: tuple[int, ...]) -> float:
        return 0.0


@EVERY
async def test_what_cannot_be_judged_has_no_value(make: Make):
    value = VerifierValue(verifier=Liking("2", unknown="0", broken="1"))
    world = Unpaid()
    tree = await opened(world)
    chosen = await make(value).decide(tree, EveryWayEngine(), world)
    known = {tree.nodes[at].message.content: tree.nodes[at] for at in tree.children(tree.head)}
    assert [(known[way].visits, known[way].value) for way in "01"] == [(0, None)] * 2
    assert tree.nodes[chosen].message.content == "2" and known["2"].value == pytest.approx(0.9)
    info = report(tree, chosen)
    assert isinstance(info["unjudged"], int) and info["unjudged"] >= 2
    assert info["last_failure"] == "GraderError: the verifier is away"


async def test_a_judgement_is_bounded_by_the_seconds_of_a_budget():
    value = RewardValue(reward=Liking("1", seconds=20.0))
    world = Unpaid()
    tree = await opened(world)
    started = time.monotonic()
    strategy = BestOfNStrategy(n=2, value=value, turn_budget=SearchBudget(seconds=0.3))
    chosen = await strategy.decide(tree, EveryWayEngine(), world)
    assert time.monotonic() - started < 10
    assert report(tree, chosen)["cut_by"] == "seconds" and report(tree, chosen)["unjudged"] == 2


SEARCHES = [
    ("BestOfN", {"n": 32, "value": "none", "open_worlds": 2}),
    ("ToT", {"num_branches": 6, "beam": 6, "depth": 3, "value": "rollout", "open_worlds": 3}),
    ("MCTS", {"num_simulations": 48, "parallel": 16, "first_branches": 8, "value": "reward", "open_worlds": 5}),
]


@pytest.mark.parametrize(("name", "options"), SEARCHES)
async def test_no_more_forks_are_open_than_may_be_and_no_branch_dies_of_it(name: str, options: JsonObject):
    world = CountedWorld(PlanningOptions(branching=50))
    tree = await opened(world)
    async with asyncio.timeout(60):
        chosen = await registry.build("strategies", name, options).decide(tree, SeededEngine(ways=50, pauses=1), world)
    info = report(tree, chosen)
    assert (info["dropped"], info["unjudged"]) == (0, 0) and "last_failure" not in info
    assert 0 < max(world.open_at_once) <= int(str(options["open_worlds"]))
    assert world.left_open == 0, "all are closed in the end"


class Lingering(CountedWorld):
    """Its forks take ``lasts`` seconds to close, and nothing closes one whose close was broken off."""

    lasts = 0.05
    closing = False

    async def close(self) -> None:
        if not self.closing:
            self.closing = True
            await asyncio.sleep(self.lasts)
            self.closed = True


async def test_who_is_stopped_while_forks_are_closed_leaves_none_open():
    world = Lingering()
    strategy = MCTSStrategy(num_simulations=16, parallel=4, value=NoValue())
    search = asyncio.ensure_future(strategy.decide(await opened(world), SeededEngine(), world))
    while not any(twin.closing for twin in world.opened):
        await asyncio.sleep(0)
    for _ in range(3):
        search.cancel()
        await asyncio.sleep(0.005)
    with pytest.raises(asyncio.CancelledError):
        await search
    assert len(world.opened) > 1 and world.left_open == 0


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


async def test_a_call_is_given_up_when_the_seconds_are_over():
    world = planning()
    tree = await opened(world)
    started = time.monotonic()
    strategy = MCTSStrategy(num_simulations=9, episode_budget=SearchBudget(seconds=0.2))
    chosen = await strategy.decide(tree, Hanging(), world)
    assert time.monotonic() - started < 10 and report(tree, chosen)["cut_by"] == "episode seconds"
    assert len(tree.children(tree.head)) == 1, "one plain completion, because every turn needs an action"
