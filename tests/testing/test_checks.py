"""The conformance checks pass what is right and name what is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from openhands_rl_plugin.core.errors import ModelError
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, Message, Observation, Score, Task, Tokens, Trajectory, Usage
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


async def test_the_scripted_engine_extends_like_a_server() -> None:
    engine = ScriptedEngine(["first é", "second"])
    ask = [Message(role="user", content="hi")]
    first = (await engine.complete(ask))[0]
    assert first.tokens is not None and first.tokens.prompt_ids == prompt_ids(ask)
    assert len(first.tokens.logprobs) == len(first.tokens.sampled_ids)
    second = (await engine.complete([*ask, first.message, Message(role="user", content="on")]))[0]
    spoken = first.tokens.prompt_ids + first.tokens.sampled_ids
    assert second.tokens is not None and second.tokens.prompt_ids[: len(spoken)] == spoken
    with pytest.raises(ModelError, match="script is over"):
        await engine.complete(ask)


class Engine(ScriptedEngine):
    """Breaks rules of engines: its completions have ``changes``, and it gives ``n`` of them."""

    def __init__(self, n: int | None = None, **changes: object) -> None:
        super().__init__(lambda messages: f"word {len(messages)}")
        self._n, self._changes = n, changes

    async def complete(self, messages: Sequence[Message], **how: Any) -> list[Completion]:
        answers = await super().complete(messages, **{**how, "n": self._n or how.get("n", 1)})
        return [answer.model_copy(update=self._changes) for answer in answers]


def gone(_: Sequence[Message]) -> str:
    raise RuntimeError("no such host")


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


class Strategy(StandardReActStrategy):
    """Does something else before it decides."""

    def __init__(self, also: Callable[[EpisodeTree, Any], Any]) -> None:
        super().__init__()
        self._also = also

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        chosen = await super().decide(tree, engine, world)
        if isinstance(done := self._also(tree, world), Awaitable):
            await done
        return chosen


class Judge(ReturnReward):
    """Judges like its parent, with ``changes`` to the score; failed episodes get ``for_failed``."""

    def __init__(self, for_failed: float | None = None, **changes: Any) -> None:
        super().__init__()
        self._for_failed, self._changes = for_failed, changes

    async def __call__(self, trajectory: Trajectory) -> Score:
        if trajectory.failure is not None:
            return Score(trajectory_id=trajectory.id, reward=self._for_failed, reward_version=self.version)
        changes = {name: next(v) if hasattr(v, "__next__") else v for name, v in self._changes.items()}
        return (await super().__call__(trajectory)).model_copy(update=changes)


def world(kind: type[GridEnvironment]) -> Awaitable[None]:
    return check_environment(kind, Task(id="walk", environment="grid"), actions=["right", "right", "down"])


def judged(judge: Judge) -> Awaitable[None]:
    return check_reward(judge, [example_trajectory(at) for at in range(3)])


TOKENS = Tokens(prompt_ids=(1,), sampled_ids=(2, 3), logprobs=(-0.1,))
RIGHT = Message(role="assistant", content="right")
WRONG: list[tuple[Callable[[], Awaitable[None]], str]] = [
    (lambda: check_engine(Engine(n=1)), r"complete\(n=3\) must return a list of 3 completions"),
    (lambda: check_engine(Engine(policy=None)), "must name its policy"),
    (lambda: check_engine(Engine(sampling=None)), "what it was sampled with"),
    (lambda: check_engine(Engine(message=Message(role="user", content="hm"))), "assistant"),
    (lambda: check_engine(Engine(usage=Usage(completion_tokens=17))), "max_tokens was 16"),
    (lambda: check_engine(Engine(tokens=TOKENS)), "a logprob for each sampled id"),
    (lambda: check_engine(Engine(tokens=TOKENS.model_copy(update={"logprobs": (-0.1, 0.5)}))), "at most 0"),
    (lambda: check_engine(Engine(tokens=TOKENS.model_copy(update={"extends": True}))), "gives the whole prompt"),
    (lambda: check_engine(Engine(tokens=TOKENS.model_copy(update={"logprobs": ()}))), "conversation is not longer"),
    (lambda: check_engine(Engine(), away=ScriptedEngine(gone)), "without its server the engine raised RuntimeError"),
    (lambda: check_engine(Engine(), away=Engine()), "answered without its server"),
    (lambda: world(Shared), "disturb each other"),
    (lambda: world(Silent), "at least one message"),
    (lambda: world(NotANumber), "rewards must be finite"),
    (lambda: world(FalseFork), "a step in a fork changed the original"),
    (lambda: check_strategy(Strategy(lambda tree, _: tree.commit(1 + tree.head))), "must not move tree.head"),
    (lambda: check_strategy(Strategy(lambda _, world: world.step(RIGHT))), "stepped the real world"),
    (lambda: check_strategy(Strategy(lambda tree, _: setattr(tree.nodes[0], "message", RIGHT))), "changed messages"),
    (lambda: judged(Judge(for_failed=0.0)), "episode that failed got a number"),
    (lambda: judged(Judge(trajectory_id="other")), "another trajectory"),
    (lambda: judged(Judge(reward_version="other")), "another version"),
    (lambda: judged(Judge(reward=float("nan"))), "raise GraderError"),
    (lambda: judged(Judge(reward=itertools.count())), "two scores"),
]


@pytest.mark.parametrize(("check", "complaint"), WRONG, ids=[complaint for _, complaint in WRONG])
async def test_what_breaks_a_rule_is_found(check: Callable[[], Awaitable[None]], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        await check()


async def test_what_is_shipped_is_right() -> None:
    await check_engine(Engine(), away=ScriptedEngine([]))
    await world(GridEnvironment)
    await check_strategy(StandardReActStrategy())
    await judged(Judge())
    assert len({example_trajectory(at).stop for at in range(4)}) == 3
