"""What an end is worth, and a state from which the episode does not go on: where rewards are paid, and where not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from search_worlds import opened

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import EnvInfo, Strategy
from openhands_rl_plugin.core.types import (
    Completion,
    JsonObject,
    Message,
    Observation,
    Score,
    Task,
    Trajectory,
)
from openhands_rl_plugin.rollout.strategies.base import BestOfNStrategy, ToTStrategy
from openhands_rl_plugin.rollout.strategies.mcts import MCTSStrategy
from openhands_rl_plugin.rollout.strategies.value import (
    ModelValue,
    NoValue,
    RewardValue,
    RewardValueOptions,
    RolloutValue,
    ValueFunction,
)
from openhands_rl_plugin.testing import ScriptedEngine

Make = Callable[[ValueFunction], Strategy]

EVERY = pytest.mark.parametrize(
    "make",
    [
        lambda value: BestOfNStrategy(n=2, value=value),
        lambda value: ToTStrategy(num_branches=2, value=value),
        lambda value: MCTSStrategy(num_simulations=16, first_branches=2, decide_by="value", value=value),
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
    """The same, which pays for the end."""

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
            last = next(said.content for said in reversed(messages) if said.role == "assistant")
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
async def test_values_that_add_up_rewards_are_refused_where_none_are_paid(make: Make, value: ValueFunction):
    world = Desk()
    engine = Worker("look")
    says = f'with value = {value.name!r} .* pays none: set value = "model", "verifier" or "reward" in'
    with pytest.raises(ConfigError, match=says) as caught:
        await make(value).decide(await opened(world), engine, world)
    assert "\n" not in str(caught.value) and not world.forks
