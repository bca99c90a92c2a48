"""The forks that a search holds: no more than it may, none closed under those who copy it, and all counted."""

from __future__ import annotations

import asyncio
import copy

import pytest
from search_worlds import CountedWorld, SeededEngine, opened, report

from evaluation.performance.search.planning import PlanningEnvironment, PlanningOptions
from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.types import JsonObject, Message, Observation
from openhands_rl_plugin.rollout.strategies.mcts import MCTSStrategy
from openhands_rl_plugin.rollout.strategies.value import NoValue

pytestmark = pytest.mark.contract


class Slow(PlanningEnvironment):
    """Takes its time to fork, to step and to close, and cannot be copied once it is closed. Counts its forks."""

    def __init__(self, options: PlanningOptions | None = None) -> None:
        super().__init__(options)
        self.closed = False
        self.forks = {"open": 0, "made": 0, "most": 0}

    async def step(self, action: Message) -> Observation:
        await asyncio.sleep(0.001)
        assert not self.closed
        return await super().step(action)

    async def fork(self) -> PlanningEnvironment:
        forks = self.forks
        forks["made"] += 1
        forks["open"] += 1
        forks["most"] = max(forks["most"], forks["open"])
        await asyncio.sleep(0.002)
        if self.closed:
            forks["open"] -= 1
            raise BadEnvironmentError("it was closed while it was copied")
        return copy.copy(self)

    async def close(self) -> None:
        assert not self.closed
        self.closed = True
        await asyncio.sleep(0.001)
        self.forks["open"] -= 1


SEARCHES = [
    ("BestOfN", {"n": 32, "value": "none", "open_worlds": 2}),
    ("ToT", {"num_branches": 6, "beam": 6, "depth": 3, "value": "rollout", "open_worlds": 3}),
    ("MCTS", {"num_simulations": 48, "parallel": 16, "first_branches": 8, "value": "reward", "open_worlds": 5}),
]


@pytest.mark.parametrize(("name", "options"), SEARCHES)
async def test_no_more_forks_are_open_than_may_be_and_no_branch_dies_of_it(name: str, options: JsonObject):
    world = Slow(PlanningOptions(branching=50))
    tree = await opened(world)
    async with asyncio.timeout(60):
        chosen = await registry.build("strategies", name, options).decide(tree, SeededEngine(ways=50, pauses=1), world)
    told = report(tree, chosen)
    assert (told["dropped"], told["unjudged"]) == (0, 0) and "last_failure" not in told
    assert 0 < world.forks["most"] <= int(str(options["open_worlds"]))
    assert world.forks["open"] == 0, "all are closed in the end"


class Lingering(CountedWorld):
    """Its forks take ``lasts`` seconds to close, and nothing closes one whose close was broken off."""

    lasts = 0.05
    closing = False

    async def close(self) -> None:
        if not self.closing:
            self.closing = True
            await asyncio.sleep(self.lasts)
            self.closed = True


@pytest.mark.parametrize("times", [1, 3])
async def test_who_is_stopped_while_forks_are_closed_leaves_none_open(times: int):
    world = Lingering()
    strategy = MCTSStrategy(num_simulations=16, parallel=4, value=NoValue())
    search = asyncio.ensure_future(strategy.decide(await opened(world), SeededEngine(), world))
    while not any(twin.closing for twin in world.opened):
        await asyncio.sleep(0)
    for _ in range(times):
        search.cancel()
        await asyncio.sleep(0.005)
    with pytest.raises(asyncio.CancelledError):
        await search
    assert len(world.opened) > 1 and world.left_open == 0
