"""An episode that is cancelled while its worker goes on: what becomes of it is not stored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import TrajectoryFilter, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Task, Trajectory
from openhands_rl_plugin.hosts.pool import EpisodeWorker, Worker
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.testing import sample_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


class Waiting(EpisodeWorker):
    """Its episodes end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: asyncio.Queue[asyncio.Future[Trajectory]] = asyncio.Queue()

    async def run(self, *given: Any, **named: Any) -> Trajectory:
        end = asyncio.get_running_loop().create_future()
        await self.asked.put(end)
        return await end


class InThisProcess(Worker):
    def __init__(self, *given: Any) -> None:
        self.worker = Waiting()
        super().__init__(*given)

    async def _answer(self, call: bytes) -> bytes:
        return await asyncio.shield(self.worker.answer(call))

    def kill(self) -> None:
        self._storing.cancel()


@pytest.mark.timeout(30)
async def test_what_a_worker_makes_of_a_cancelled_episode_is_not_stored(tmp_path: Path) -> None:
    """Its workspace is taken away under it: it would be an infrastructure failure, or a patch that deletes all."""
    request = EpisodeRequest(task=Task(id="t", environment="shop"), run_id="r", group_id="g")
    made = sample_episode(trajectory_id(request), task="t")
    async with FileTrajectoryStorage(tmp_path) as storage:
        pool = InThisProcess(RLSettings(), HostOptions(), storage)
        kept: Any = pool.worker
        running = asyncio.create_task(pool.run(request, None, None))
        cancelled = await kept.asked.get()
        running.cancel()
        await asyncio.wait({running})
        cancelled.set_result(made)
        with pytest.raises(StorageError, match="the episode was cancelled"):
            await kept.add(made)
        assert [each async for each in storage.find(TrajectoryFilter(finished=None))] == []
        running = asyncio.create_task(pool.run(request, None, None))
        again = await kept.asked.get()
        await kept.add(made)
        found = [each.id async for each, _ in storage.find(TrajectoryFilter(finished=None))]
        assert found == [made.id], "the next attempt in this process is stored"
        again.set_result(made)
        assert await running == made
        pool.kill()  # to close it would remove the temporary folders of this process
