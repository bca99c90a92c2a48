"""The forks of one decision are closed whatever ends it."""

from __future__ import annotations

import asyncio

import pytest

from evaluation.performance.search.planning import PlanningEnvironment
from openhands_rl_plugin.core.types import Limits, Task
from openhands_rl_plugin.rollout.forks import EnvironmentWorld


class Lingering(PlanningEnvironment):
    """Takes its time to close."""

    closed = 0

    async def close(self) -> None:
        await asyncio.sleep(0.05)
        Lingering.closed += 1


async def test_who_is_stopped_again_and_again_while_forks_are_closed_leaves_none_open():
    live = Lingering()
    await live.reset(Task(id="plan", environment="planning"))
    world = EnvironmentWorld(live, Limits())
    for _ in range(3):
        await world.fork()
    closing = asyncio.ensure_future(world.close())
    for _ in range(2):
        await asyncio.sleep(0.005)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert Lingering.closed == 3
