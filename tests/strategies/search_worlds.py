"""Engines and worlds that the tests of search share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from openhands_rl_plugin.errors import InfrastructureError
from openhands_rl_plugin.protocols import Environment, Strategy
from openhands_rl_plugin.testing import ScriptedEngine
from openhands_rl_plugin.testing_planning import PlanningEnvironment, PlanningOptions
from openhands_rl_plugin.tree import EpisodeTree
from openhands_rl_plugin.types import Completion, JsonObject, Message, Observation, SamplingParams, Task

TASK = Task(id="plan", environment="planning")


class SeededEngine(ScriptedEngine):
    """Says a number below ``ways``, drawn from the seed that is asked for, or from its own when there is none."""

    def __init__(self, ways: int = 4, seed: int = 0) -> None:
        super().__init__([])
        self.asked: list[SamplingParams | None] = []
        self._ways = ways
        self._random = random.Random(seed)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        self.asked.append(sampling)
        seed = sampling.seed if sampling is not None else None
        drawn = self._random if seed is None else random.Random(f"{seed}/{len(messages)}/{messages[-1].content}")
        voice = ScriptedEngine([str(drawn.randrange(self._ways)) for _ in range(n)])
        self.calls.append(tuple(messages))
        return await voice.complete(messages, n=n, sampling=sampling)


class EveryWayEngine(ScriptedEngine):
    """Asked for n answers it says 0, 1, ... n - 1."""

    def __init__(self) -> None:
        super().__init__([])

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        self.calls.append(tuple(messages))
        return await ScriptedEngine([str(at) for at in range(n)]).complete(messages, n=n, sampling=sampling)


class FragileWorld(PlanningEnvironment):
    """Its forks die of the ways in ``deadly``; one of ``slow`` ways takes a second."""

    deadly: frozenset[str] = frozenset()
    slow: frozenset[str] = frozenset()
    copied = False

    async def step(self, action: Message) -> Observation:
        if self.copied and action.content in self.deadly:
            raise InfrastructureError("the server of this fork is gone")
        if self.copied and action.content in self.slow:
            await asyncio.sleep(1)
        return await super().step(action)

    async def fork(self) -> PlanningEnvironment:
        twin = await super().fork()
        assert isinstance(twin, FragileWorld)
        twin.copied = True
        return twin


async def opened(environment: Environment) -> EpisodeTree:
    """A tree that stands at the opening of ``environment``."""
    tree = EpisodeTree()
    tree.observe(await environment.reset(TASK))
    return tree


async def played(strategy: Strategy, environment: PlanningEnvironment, engine: ScriptedEngine) -> EpisodeTree:
    """The whole episode."""
    tree = await opened(environment)
    while not tree.terminated:
        tree.commit(await strategy.decide(tree, engine, environment))
        tree.observe(await environment.step(tree.action))
    return tree


def planning(seed: int = 0, depth: int = 4, branching: int = 4) -> PlanningEnvironment:
    return PlanningEnvironment(PlanningOptions(seed=seed, depth=depth, branching=branching))


def report(tree: EpisodeTree, node: int) -> JsonObject:
    """What the strategy noted on the action that it decided for."""
    notes = tree.nodes[node].metadata["search"]
    assert isinstance(notes, dict)
    found = notes["report"]
    assert isinstance(found, dict)
    return found
