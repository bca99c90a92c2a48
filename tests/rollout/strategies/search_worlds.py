"""Engines and worlds that the tests of search share."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence

from evaluation.performance.search.planning import PlanningEnvironment, PlanningOptions
from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.protocols import Environment, Strategy
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, Observation, SamplingParams, Task
from openhands_rl_plugin.testing import ScriptedEngine

TASK = Task(id="plan", environment="planning")


class SeededEngine(ScriptedEngine):
    """Says a number below ``ways``, drawn from the seed that is asked for, or from its own when there is none.

    It answers after others had their turn, as a server does; ``pauses`` draws how often they have it.
    """

    def __init__(self, ways: int = 4, seed: int = 0, pauses: int | None = None) -> None:
        super().__init__([])
        self.asked: list[SamplingParams | None] = []
        self._ways = ways
        self._random = random.Random(seed)
        self._pauses = None if pauses is None else random.Random(pauses)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        self.asked.append(sampling)
        for _ in range(1 if self._pauses is None else self._pauses.randrange(20)):
            await asyncio.sleep(0)
        self._script = iter(self._texts(messages, n, sampling))
        return await super().complete(messages, n=n, sampling=sampling)

    def _texts(self, messages: Sequence[Message], n: int, sampling: SamplingParams | None) -> list[str]:
        seed = sampling.seed if sampling is not None else None
        drawn = self._random if seed is None else random.Random(f"{seed}/{len(messages)}/{messages[-1].content}")
        return [str(drawn.randrange(self._ways)) for _ in range(n)]


class EveryWayEngine(SeededEngine):
    """Answers a request for n completions with 0, 1, ... n - 1."""

    def _texts(self, messages: Sequence[Message], n: int, sampling: SamplingParams | None) -> list[str]:
        return [str(at) for at in range(n)]


class FragileWorld(PlanningEnvironment):
    """Its forks die of the ways in ``deadly``."""

    deadly: frozenset[str] = frozenset()
    copied = False

    async def step(self, action: Message) -> Observation:
        if self.copied and action.content in self.deadly:
            raise InfrastructureError("the server of this fork is gone")
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


async def searched(strategy: Strategy, environment: PlanningEnvironment, engine: ScriptedEngine) -> EpisodeTree:
    """The whole episode."""
    tree = await opened(environment)
    while not tree.terminated:
        tree.commit(await strategy.decide(tree, engine, environment))
        tree.observe(await environment.step(tree.action))
    return tree


class CountedWorld(PlanningEnvironment):
    """Knows which of its forks are open; forking, a step in a fork and closing let others have their turn."""

    def __init__(self, options: PlanningOptions | None = None) -> None:
        super().__init__(options)
        self.opened: list[CountedWorld] = []
        self.open_at_once: list[int] = []
        self.closed = False

    @property
    def left_open(self) -> int:
        return sum(not twin.closed for twin in self.opened)

    async def step(self, action: Message) -> Observation:
        assert not self.closed
        if self in self.opened:
            await asyncio.sleep(0.002)
        return await super().step(action)

    async def fork(self) -> PlanningEnvironment:
        twin = copy.copy(self)
        twin.steps_taken = 0
        self.opened.append(twin)
        self.open_at_once.append(self.left_open)
        await asyncio.sleep(0.002)
        if self.closed:
            twin.closed = True
            raise BadEnvironmentError("it was closed while it was copied")
        return twin

    async def close(self) -> None:
        self.closed = True


def ways_of(tree: EpisodeTree) -> dict[tuple[str, ...], tuple[int, float | None]]:
    """The actions that lead to each sampled node -> its visits and value."""
    nodes = tree.nodes
    return {
        tuple(nodes[up].message.content or "" for up in tree.path(at) if nodes[up].sampled): (node.visits, node.value)
        for at, node in enumerate(nodes)
        if node.sampled
    }


def planning(seed: int = 0, depth: int = 4, branching: int = 4) -> PlanningEnvironment:
    return PlanningEnvironment(PlanningOptions(seed=seed, depth=depth, branching=branching))


def report(tree: EpisodeTree, node: int) -> JsonObject:
    """What the strategy noted on the action that it decided for."""
    notes = tree.nodes[node].metadata["search"]
    assert isinstance(notes, dict)
    found = notes["report"]
    assert isinstance(found, dict)
    return found


class UnforkableWorld(PlanningEnvironment):
    """Counts its forks, and makes none while they are ``refused``, as a workspace in which processes run."""

    refused = False
    forks = 0

    async def fork(self) -> PlanningEnvironment:
        if self.refused:
            raise BadEnvironmentError("it cannot be forked while processes run")
        self.forks += 1
        return await super().fork()
