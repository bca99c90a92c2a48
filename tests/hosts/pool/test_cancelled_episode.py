"""An episode that is cancelled while its worker plays on: what becomes of it is not stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import TrajectoryFilter, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Task, Trajectory
from openhands_rl_plugin.hosts.pool.connection import Peer, WorkerConnection
from openhands_rl_plugin.hosts.pool.worker import PoolStorage
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.testing.samples import sample_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


class PlayingOn:
    """A worker in this process, whose episodes end when the test says so."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[Trajectory]] = asyncio.Queue()
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self.pool = Peer(self, self._said.put)

    async def start(self, *given: object) -> None: ...

    async def run(self, *given: object) -> Trajectory:
        end = asyncio.get_running_loop().create_future()
        await self.asked.put(end)
        return await end

    async def send(self, message: bytes) -> None:
        self.pool.receive(message)

    async def receive(self) -> Sequence[bytes]:
        said = await self._said.get()
        return (said,) if said else ()

    async def exit_message(self) -> str:
        return "closed"

    def kill(self) -> None:
        self._said.put_nowait(b"")

    async def close(self) -> None:
        self.kill()


@pytest.mark.timeout(30)
async def test_what_a_worker_makes_of_a_cancelled_episode_is_not_stored(tmp_path: Path) -> None:
    """Its workspace is taken away under it: it would be an infrastructure failure, or a patch that deletes all."""
    request = EpisodeRequest(task=Task(id="t", environment="shop"), run_id="r", group_id="g")
    made = sample_episode(trajectory_id(request), task="t")
    async with FileTrajectoryStorage(tmp_path) as storage:
        worker = PlayingOn()
        connection = WorkerConnection(worker, RLSettings(), HostOptions(), storage)
        kept = PoolStorage(worker.pool)
        running = asyncio.create_task(connection.run(request, None, None))
        cancelled = await worker.asked.get()
        running.cancel()
        await asyncio.wait({running})
        cancelled.set_result(made)
        with pytest.raises(StorageError, match="the episode was cancelled"):
            await kept.add(made)
        assert [each async for each in storage.find(TrajectoryFilter(finished=None))] == []
        running = asyncio.create_task(connection.run(request, None, None))
        again = await worker.asked.get()
        await kept.add(made)
        found = [each.id async for each, _ in storage.find(TrajectoryFilter(finished=None))]
        assert found == [made.id], "the next attempt in this process is stored"
        again.set_result(made)
        assert await running == made
        await connection.close()
