"""A pool without episodes ends its workers, whatever comes meanwhile. Workers are scripted; the real ones are in
``hosts/v0/test_driver.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Task, Trajectory
from openhands_rl_plugin.hosts.pool.connection import (
    TO_WORKER,
    FromWorker,
    Ready,
    RunEpisode,
    WorkerResult,
    from_line,
    to_line,
)
from openhands_rl_plugin.hosts.pool.runner import WorkerPoolRunner
from openhands_rl_plugin.testing.samples import sample_episode


class Worker:
    """Plays at once, and takes ``closing`` seconds to end."""

    def __init__(self, closing: float) -> None:
        self._closing = closing
        self._says: asyncio.Queue[FromWorker | None] = asyncio.Queue()
        self._says.put_nowait(Ready())
        self.ending = asyncio.Event()

    async def send(self, line: bytes) -> None:
        if isinstance(asked := from_line(TO_WORKER, line), RunEpisode):
            played = sample_episode(trajectory_id(asked.request), task=asked.request.task.id)
            self._says.put_nowait(WorkerResult(number=asked.number, trajectory=played))

    async def receive(self) -> Sequence[bytes]:
        said = await self._says.get()
        return () if said is None else (to_line(said),)

    async def exit_message(self) -> str:
        return "a worker process ended"

    def kill(self) -> None:
        self._says.put_nowait(None)

    async def close(self) -> None:
        self.ending.set()
        await asyncio.sleep(self._closing)
        self.kill()


class Pool(WorkerPoolRunner):
    def __init__(self, *, closing: float = 0.2, idle_timeout: float = 0.05) -> None:
        super().__init__(RLSettings(), workers=1, idle_timeout=idle_timeout)
        self._slow = closing
        self.started: list[Worker] = []

    async def _connect(self) -> Worker:
        self.started.append(Worker(self._slow))
        return self.started[-1]


async def played(pool: Pool, name: str = "t") -> Trajectory:
    return await pool.run(EpisodeRequest(task=Task(id=name, environment="shop"), run_id="r", group_id=name))


@pytest.mark.timeout(30)
async def test_an_episode_that_comes_while_workers_end_has_a_new_one() -> None:
    pool = Pool()
    assert (await played(pool)).failure is None
    await pool.started[0].ending.wait()
    assert (await played(pool, "u")).failure is None and len(pool.started) == 2
    await pool.close()


@pytest.mark.timeout(30)
async def test_a_pool_is_closed_while_its_idle_workers_end() -> None:
    pool = Pool()
    await played(pool)
    await pool.started[0].ending.wait()
    await pool.close()
    assert len(asyncio.all_tasks()) == 1, "nothing is left"


@pytest.mark.timeout(30)
async def test_closing_does_not_wait_until_workers_are_idle_long_enough() -> None:
    pool = Pool(closing=0.0, idle_timeout=60.0)
    await asyncio.gather(*(played(pool, str(number)) for number in range(3)))
    async with asyncio.timeout(5):
        await pool.close()
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.timeout(30)
async def test_workers_stay_while_episodes_come() -> None:
    pool = Pool(idle_timeout=0.5)
    for number in range(10):
        await played(pool, str(number))
        await asyncio.sleep(0.1)
    assert len(pool.started) == 1 and not pool.started[0].ending.is_set()
    await pool.close()
