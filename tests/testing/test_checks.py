"""The conformance checks pass what is right and name what is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from openhands_rl_plugin.core.errors import ModelError
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    JsonObject,
    Message,
    Observation,
    Score,
    StopReason,
    Task,
    Tokens,
    Trajectory,
    Usage,
)
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.testing import (
    GridEnvironment,
    ScriptedEngine,
    check_engine,
    check_environment,
    check_reward,
    check_strategy,
    example_trajectory,
    prompt_ids,
)

TASK = Task(id="walk", environment="grid")
MOVES = ["right", "right", "down"]


async def test_the_scripted_engine_extends_like_a_server():
    engine = ScriptedEngine(["first é", "second"])
    ask = [Message(role="user", content="hi")]
    first = (await engine.complete(ask))[0]
    assert first.tokens is not None
    assert first.tokens.prompt_ids == prompt_ids(ask)
    assert len(first.tokens.logprobs) == len(first.tokens.sampled_ids)
    second = (await engine.complete([*ask, first.message, Message(role="user", content="on")]))[0]
    assert second.tokens is not None
    spoken = first.tokens.prompt_ids + first.tokens.sampled_ids
    assert second.tokens.prompt_ids[: len(spoken)] == spoken
    with pytest.raises(ModelError, match="over after 2 answers"):
        await engine.complete(ask)


class HalfAnEngine(ScriptedEngine):
    """Breaks one rule of engines."""

    def __init__(self, **changes: object) -> None:
        super().__init__(lambda messages: f"word {len(messages)}")
        self._changes = changes

    async def complete(self, messages: Sequence[Message], **how: Any) -> list[Completion]:
        answers = await super().complete(messages, **how)
        return [answer.model_copy(update=self._changes) for answer in answers]


class OneAnswer(ScriptedEngine):
    """Ignores ``n``, as some servers do."""

    async def complete(self, messages: Sequence[Message], **how: Any) -> list[Completion]:
        return await super().complete(messages, **{**how, "n": 1})


async def test_an_engine_that_breaks_a_rule_is_found():
    await check_engine(HalfAnEngine(), away=ScriptedEngine([]))
    with pytest.raises(AssertionError, match=r"complete\(n=3\) must return a list of 3 completions"):
        await check_engine(OneAnswer(lambda _: "word"))
    tokens = Tokens(prompt_ids=(1,), sampled_ids=(2, 3), logprobs=(-0.1,))
    for changes, rule in (
        ({"policy": None}, "must name its policy"),
        ({"sampling": None}, "what it was sampled with"),
        ({"message": Message(role="user", content="hm")}, "assistant"),
        ({"usage": Usage(completion_tokens=17)}, "max_tokens was 16"),
        ({"tokens": tokens}, "a logprob for each sampled id"),
        ({"tokens": tokens.model_copy(update={"logprobs": (-0.1, 0.5)})}, "at most 0"),
        ({"tokens": tokens.model_copy(update={"logprobs": (), "extends": True})}, "gives the whole prompt"),
        ({"tokens": tokens.model_copy(update={"logprobs": ()})}, "longer conversation is not longer"),
    ):
        with pytest.raises(AssertionError, match=rule):
            await check_engine(HalfAnEngine(**changes))
    with pytest.raises(AssertionError, match="without its server the engine raised RuntimeError"):
        await check_engine(HalfAnEngine(), away=ScriptedEngine(_gone))
    with pytest.raises(AssertionError, match="answered without its server"):
        await check_engine(HalfAnEngine(), away=HalfAnEngine())


def _gone(_: Sequence[Message]) -> str:
    raise RuntimeError("no such host")


async def test_what_is_shipped_is_right():
    await check_environment(GridEnvironment, TASK, actions=MOVES)
    await check_strategy(StandardReActStrategy())
    await check_reward(ReturnReward(), [example_trajectory(at) for at in range(3)])
    assert {example_trajectory(at).stop for at in range(4)} == {
        StopReason.TERMINATED,
        StopReason.MAX_TURNS,
        StopReason.ERROR,
    }


class Shared(GridEnvironment):
    """All episodes stand on one square."""

    place = (0, 0)

    async def reset(self, task: Task) -> Observation:
        type(self).place = (0, 0)
        return await super().reset(task)

    async def step(self, action: Message) -> Observation:
        self._at = type(self).place
        observation = await super().step(action)
        type(self).place = self._at
        return observation


class Silent(GridEnvironment):
    async def reset(self, task: Task) -> Observation:
        await super().reset(task)
        return Observation()


class NotANumber(GridEnvironment):
    async def step(self, action: Message) -> Observation:
        return (await super().step(action)).model_copy(update={"reward": float("nan")})


class FalseFork(GridEnvironment):
    async def fork(self) -> GridEnvironment:
        return self


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (Shared, "disturb each other"),
        (Silent, "at least one message"),
        (NotANumber, "rewards must be finite"),
        (FalseFork, "a step in a fork changed the original"),
    ],
)
async def test_wrong_environments_are_found(environment: type[GridEnvironment], complaint: str):
    with pytest.raises(AssertionError, match=complaint):
        await check_environment(environment, TASK, actions=MOVES)


class Moves(StandardReActStrategy):
    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        chosen = await super().decide(tree, engine, world)
        tree.commit(chosen)
        return chosen


class StepsTheWorld(StandardReActStrategy):
    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        assert isinstance(world, GridEnvironment)
        await world.step(Message(role="assistant", content="right"))
        return await super().decide(tree, engine, world)


class Rewrites(StandardReActStrategy):
    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        tree.nodes[0].message = Message(role="system", content="forget it")
        return await super().decide(tree, engine, world)


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        (Moves, "must not move tree.head"),
        (StepsTheWorld, "stepped the real world"),
        (Rewrites, "changed messages"),
    ],
)
async def test_wrong_strategies_are_found(strategy: type[StandardReActStrategy], complaint: str):
    with pytest.raises(AssertionError, match=complaint):
        await check_strategy(strategy())


class Judge(ReturnReward):
    """Judges like its parent, with ``changes`` to the score; failed episodes get ``for_failed``."""

    def __init__(self, for_failed: float | None = None, **changes: Any) -> None:
        super().__init__()
        self._for_failed = for_failed
        self._changes = changes

    async def __call__(self, trajectory: Trajectory) -> Score:
        if trajectory.failure is not None:
            return Score(trajectory_id=trajectory.id, reward=self._for_failed, reward_version=self.version)
        changes: JsonObject = {name: next(v) if hasattr(v, "__next__") else v for name, v in self._changes.items()}
        return (await super().__call__(trajectory)).model_copy(update=changes)


@pytest.mark.parametrize(
    ("judge", "complaint"),
    [
        (Judge(), None),
        (Judge(for_failed=0.0), "episode that failed got a number"),
        (Judge(trajectory_id="other"), "another trajectory"),
        (Judge(reward_version="other"), "another version"),
        (Judge(reward=float("nan")), "raise GraderError"),
        (Judge(reward=itertools.count()), "two scores"),
    ],
)
async def test_wrong_rewards_are_found(judge: Judge, complaint: str | None):
    if complaint is None:
        await check_reward(judge, [example_trajectory()])
        return
    with pytest.raises(AssertionError, match=complaint):
        await check_reward(judge, [example_trajectory()])
