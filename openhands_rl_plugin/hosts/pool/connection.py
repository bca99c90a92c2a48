"""The pool's side of one worker, over any channel: its episodes and their records for the storage."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

from openhands_rl_plugin.core.errors import InfrastructureError, RLError, boundary, describe
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, FailureKind, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.pool.messages import (
    FROM_WORKER,
    FromWorker,
    Ready,
    RunEpisode,
    Start,
    Store,
    Stored,
    WorkerResult,
    from_line,
    to_line,
)

# Seconds. Importing OpenHands takes ten on an idle machine, and a cluster may have to start a machine first.
_START_TIMEOUT = 600.0


class WorkerChannel(Protocol):
    """Lines of ``messages`` to and from one worker, on any machine."""

    async def send(self, line: bytes) -> None:
        """Send a line. Returns silently when the worker is gone: ``receive`` reports that."""
        ...

    async def receive(self) -> Sequence[bytes]:
        """The next lines; empty when the worker is gone. Raises ``InfrastructureError`` for other data."""
        ...

    async def exit_message(self) -> str:
        """Why the worker is gone, after ``receive`` has returned nothing."""
        ...

    def kill(self) -> None:
        """End the worker at once."""
        ...

    async def close(self) -> None:
        """Let the worker close its sessions, then end it."""
        ...


class WorkerConnection:
    """One worker. ``load`` is the number of its running episodes, ``was_ready`` whether it has ever been ready."""

    def __init__(self, channel: WorkerChannel, start: Start, storage: TrajectoryStorage | None) -> None:
        self._channel = channel
        self._storage = storage
        self._storing: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._results: dict[int, asyncio.Future[Trajectory]] = {}
        self._cancelled: set[str] = set()
        self._started = asyncio.Event()
        self._error: RLError | None = None
        self._listener = asyncio.create_task(self._listen(start))
        self.load = 0
        self.was_ready = False
        self.alive = True

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None, timeout: float | None) -> Trajectory:
        """Run an episode. Raises ``InfrastructureError`` when the worker dies or does not answer within ``timeout``
        seconds (it is killed then), and errors that must stop the run."""
        self.load += 1
        self._cancelled.discard(trajectory_id(request))
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await self._started.wait()
            return await self._result(request, workspace, timeout)
        except TimeoutError as error:
            late = (
                f"did not answer within {timeout:g} s" if self.was_ready else f"was not ready in {_START_TIMEOUT:g} s"
            )
            self._kill()
            raise InfrastructureError(f"a worker {late} and was ended") from error
        except asyncio.CancelledError:
            # The worker plays on while the caller takes the workspace away: what becomes of it is nobody's episode.
            self._cancelled.add(trajectory_id(request))
            raise
        finally:
            self.load -= 1

    async def close(self) -> None:
        """End the worker and its episodes."""
        await self._channel.close()
        await self._listener

    async def _result(
        self, request: EpisodeRequest, workspace: TaskWorkspace | None, timeout: float | None
    ) -> Trajectory:
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        result = self._results[number] = asyncio.get_running_loop().create_future()
        try:
            await self._channel.send(to_line(RunEpisode(number=number, request=request, workspace=workspace)))
            async with asyncio.timeout(timeout):
                return await result
        finally:
            del self._results[number]

    async def _listen(self, start: Start) -> None:
        try:
            await self._channel.send(to_line(start))
            while lines := await self._channel.receive():
                for line in lines:
                    self._take(from_line(FROM_WORKER, line))
        except InfrastructureError as error:
            self._error = error
            self._kill()
        self.alive = False
        await asyncio.gather(*self._storing)
        self._error = self._error or InfrastructureError(await self._channel.exit_message())
        self._started.set()
        for result in self._results.values():
            if not result.done():
                result.set_exception(self._error)

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Ready):
            self.was_ready = True
            self._started.set()
        elif isinstance(message, Store):
            storing = asyncio.create_task(self._store(message))
            self._storing.add(storing)
            storing.add_done_callback(self._storing.discard)
        elif message.number is None:
            self._error = message.as_error()
            self._started.set()
        elif (result := self._results.get(message.number)) is not None and not result.done():
            if isinstance(message, WorkerResult):
                result.set_result(message.trajectory)
            else:
                result.set_exception(message.as_error())

    async def _store(self, message: Store) -> None:
        assert self._storage is not None
        if message.episodes & self._cancelled:
            await self._channel.send(to_line(Stored(number=message.number, error="the episode was cancelled")))
            return
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "storage"):
                answer = await message.write_to(self._storage)
        except RLError as error:
            answer = Stored(number=message.number, error=str(error) or describe(error))
        await self._channel.send(to_line(answer))

    def _kill(self) -> None:
        self.alive = False
        self._channel.kill()
