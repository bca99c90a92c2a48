"""An episode that is cancelled while its worker plays on: what becomes of it is not stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.records import TrajectoryFilter, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Task
from openhands_rl_plugin.hosts.pool.connection import (
    TO_WORKER,
    FromWorker,
    Ready,
    RunEpisode,
    Start,
    Store,
    Stored,
    WorkerConnection,
    WorkerResult,
    from_line,
    to_line,
)
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.testing.samples import sample_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


class PlayingOn:
    """A worker's end of a channel, in this process: it says what the test says."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[object] = asyncio.Queue()
        self.says: asyncio.Queue[FromWorker | None] = asyncio.Queue()

    async def send(self, line: bytes) -> None:
        await self.heard.put(from_line(TO_WORKER, line))

    async def receive(self) -> Sequence[bytes]:
        said = await self.says.get()
        return () if said is None else (to_line(said),)

    async def exit_message(self) -> str:
        return "closed"

    def kill(self) -> None:
        self.says.put_nowait(None)

    async def close(self) -> None:
        self.kill()


@pytest.mark.timeout(30)
async def test_what_a_worker_makes_of_a_cancelled_episode_is_not_stored(tmp_path: Path) -> None:
    """Its workspace is taken away under it: it would be an infrastructure failure, or a patch that deletes all."""
    request = EpisodeRequest(task=Task(id="t", environment="shop"), run_id="r", group_id="g")
    made = sample_episode(trajectory_id(request), task="t")
    async with FileTrajectoryStorage(tmp_path) as storage:
        channel = PlayingOn()
        start = Start(settings=RLSettings(), options=HostOptions(), stores=True)
        connection = WorkerConnection(channel, start, storage)
        await channel.says.put(Ready())
        for cancelled in (True, False):
            running = asyncio.create_task(connection.run(request, None, None))
            while not isinstance(asked := await channel.heard.get(), RunEpisode):
                pass
            if cancelled:
                running.cancel()
                await asyncio.wait({running})
            await channel.says.put(Store(number=int(cancelled), trajectory=made))
            answer = await channel.heard.get()
            assert isinstance(answer, Stored) and bool(answer.error) == cancelled
            found = [each.id async for each, _ in storage.find(TrajectoryFilter(finished=None))]
            assert found == ([] if cancelled else [made.id]), "the next attempt in this process is stored"
        await channel.says.put(WorkerResult(number=asked.number, trajectory=made))
        assert await running == made
        await connection.close()
