"""Runs a host's episodes in several workers, each with many sessions: one process is limited by its interpreter lock.

Workers are new Python processes, not forks, so they inherit no state. They get the settings and read secrets
from the environment variables that the settings name.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import shielded
from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    InfrastructureError,
    RLError,
    StorageError,
    boundary,
    describe,
)
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, FailureKind, StopReason, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.rollout.journal import stored_episode
from openhands_rl_plugin.rollout.session import failed_episode

# Seconds beyond an episode's time limit, which the worker enforces: to start the worker (importing OpenHands takes ten
# on an idle machine, and a cluster may have to start a machine first), and to open, close and store the session.
_TIME_BEYOND_LIMIT = 600.0
# Seconds for a worker to close its sessions.
_CLOSE_TIMEOUT = 10.0
# Seconds without an episode after which the workers are ended. A worker holds half a gigabyte, and starts anew in ten
# seconds: it does not wait through a training step, or beside the pool of an evaluation.
_IDLE_TIMEOUT = 60.0

LENGTH_BYTES = 8
"""An answer is sent after its length."""

_MODULE = "openhands_rl_plugin.hosts.pool.worker"
# Bytes of the output that are read: a traceback ends with its cause.
_LONGEST_LINE = 10_000


type Outcome = tuple[Any, RLError | None]
type Given = tuple[RLSettings, HostOptions, bool]
"""What a worker makes its runner of; and whether the pool has a storage."""


async def outcome(work: Awaitable[Any]) -> Outcome:
    """What ``work`` returns, or the error that it raises, of a class that pickle can carry."""
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "worker"):
            return await work, None
    except CaughtFailure as caught:
        return None, InfrastructureError(str(caught))
    except RLError as error:
        return None, error


class Worker(ABC):
    """One worker, and the storage of its records. ``load`` is the number of its running episodes.

    It is sent the settings, with names of environment variables, but no secrets.
    """

    def __init__(self, settings: RLSettings, options: HostOptions, storage: TrajectoryStorage | None) -> None:
        self.load = 0
        self._given: Given = settings, options, storage is not None
        self._storage = storage
        self._cancelled: set[str] = set()
        self._storing = asyncio.create_task(self._store_records())

    @property
    def alive(self) -> bool:
        """Whether it can still be called."""
        return not self._storing.done()

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None, timeout: float | None) -> Trajectory:
        """Run an episode. Raises ``InfrastructureError`` when the worker dies or does not answer within ``timeout``
        seconds (it is killed then), and errors that must stop the run."""
        self.load += 1
        self._cancelled.discard(trajectory_id(request))
        try:
            async with asyncio.timeout(timeout):
                return await self._call("run", self._given, request, workspace)
        except TimeoutError as error:
            self.kill()
            await asyncio.wait({self._storing})
            raise InfrastructureError(f"a worker did not answer within {timeout:g} s and was ended") from error
        except asyncio.CancelledError:
            # The worker goes on while the caller takes the workspace away: what becomes of it is nobody's episode.
            self._cancelled.add(trajectory_id(request))
            raise
        finally:
            self.load -= 1

    async def close(self) -> None:
        """Let the worker close its sessions, then end it."""
        with suppress(TimeoutError, InfrastructureError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._call("close")
        self.kill()
        await asyncio.wait({self._storing})

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once."""

    @abstractmethod
    async def _answer(self, call: bytes) -> bytes:
        """As ``EpisodeWorker.answer``. Raises ``InfrastructureError`` when the worker is gone."""

    async def _call(self, method: str, *arguments: object) -> Any:
        value, error = pickle.loads(await self._answer(pickle.dumps((method, arguments))))
        if error is not None:
            raise error
        return value

    async def _store_records(self) -> None:
        """Store what the worker's episodes record, until it is gone."""
        stored = []
        with suppress(InfrastructureError):
            while True:
                records = await self._call("records", stored)
                stored = await asyncio.gather(*(outcome(self._store(*each)) for each in records))

    async def _store(self, method: str, record: Any) -> Any:
        if {getattr(record, "id", ""), getattr(record, "trajectory_id", "")} & self._cancelled:
            raise StorageError("the episode was cancelled")
        return await getattr(self._storage, method)(record)


class ProcessWorker(Worker):
    """A process of this machine. Each call has a socket of its own, which is sent to the process."""

    def __init__(self, *given: Any) -> None:
        self._calls, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the worker
        command = [sys.executable, "-P", "-m", _MODULE]
        try:
            with theirs:
                self.process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=self._output, stderr=self._output, start_new_session=True
                )
        except OSError as error:
            raise InfrastructureError(f"no worker process could be started: {error}") from error
        super().__init__(*given)

    def kill(self) -> None:
        """As in ``Worker``."""
        self._calls.close()
        self.process.kill()

    async def _answer(self, call: bytes) -> bytes:
        own, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=own)
        try:
            with theirs:
                socket.send_fds(self._calls, [b"c"], [theirs.fileno()])
            writer.write(call)
            writer.write_eof()
            return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES)))
        except (OSError, asyncio.IncompleteReadError) as error:
            status = await asyncio.to_thread(self.process.wait)
            raise InfrastructureError(f"a worker process {self._end(status)}") from error
        finally:
            writer.close()

    def _end(self, status: int) -> str:
        """The signal, or the status and the last line that the process printed."""
        if status < 0:
            return f"was ended by signal {-status}"
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _LONGEST_LINE))
        lines = self._output.read().decode("utf-8", "replace").strip().splitlines()
        return f"ended with status {status}" + (f": {lines[-1][:300]!r}" if lines else "")


class WorkerPoolRunner:
    """An ``EpisodeRunner`` over ``workers`` workers of a kind, by default processes of this machine.

    ``options.sessions`` limits the sessions of each worker (default: ``[rl] max_workers`` divided by ``workers``).
    When a worker dies, its episodes are returned as infrastructure failures, and the worker is replaced. After
    ``idle_timeout`` seconds without an episode the workers end; the next episode starts them again. With a
    ``storage`` this process stores the episodes of all workers while they run.
    """

    def __init__(
        self,
        settings: RLSettings,
        options: HostOptions | None = None,
        *,
        workers: int = 2,
        storage: TrajectoryStorage | None = None,
        idle_timeout: float = _IDLE_TIMEOUT,
        kind: type[Worker] = ProcessWorker,
    ) -> None:
        options = options or HostOptions()
        sessions = options.sessions or max(1, settings.max_workers // workers)
        self._settings = settings
        self._options = options.model_copy(update={"sessions": sessions})
        self._storage = storage
        self._kind = kind
        self._free_sessions = asyncio.Semaphore(workers * sessions)
        self._count, self._workers = workers, list[Worker]()
        self._starting = asyncio.Lock()
        self._idle_timeout = idle_timeout
        self._episodes = 0
        self._idle: asyncio.Task[None] | None = None

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        async with self._free_sessions:
            started = time.time()
            self._episodes += 1
            self._end_idle()
            try:
                worker = await self._least_busy()
                limit = (request.task.limits or self._settings.limits()).timeout
                return await worker.run(request, workspace, timeout=limit and limit + _TIME_BEYOND_LIMIT)
            except InfrastructureError as error:
                return await self._failed(request, error, started)
            finally:
                self._episodes -= 1
                if not self._episodes:
                    self._idle = asyncio.create_task(self._end_workers(after=self._idle_timeout))

    async def close(self) -> None:
        """End the workers and the episodes that they run."""
        self._end_idle()
        await self._end_workers()

    def _end_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()

    async def _end_workers(self, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        # An episode that comes meanwhile waits for this, and starts workers anew.
        async with self._starting:
            workers, self._workers = self._workers, []
            await shielded(asyncio.gather(*(worker.close() for worker in workers)))

    async def _least_busy(self) -> Worker:
        async with self._starting:
            self._workers = [worker for worker in self._workers if worker.alive]
            while len(self._workers) < self._count:
                self._workers.append(self._kind(self._settings, self._options, self._storage))
            # If the worker has died since, it returns an error for the episode.
            return min(self._workers, key=lambda worker: worker.load)

    async def _failed(self, request: EpisodeRequest, error: InfrastructureError, started: float) -> Trajectory:
        """The episode of a dead worker, with its stored part, which may even be complete."""
        stored = await stored_episode(self._storage, trajectory_id(request)) if self._storage is not None else None
        if stored is not None and stored.stop is not StopReason.UNFINISHED:
            return stored
        trajectory = failed_episode(
            request,
            Failure(kind=FailureKind.INFRASTRUCTURE, message=describe(error), boundary="controller.worker"),
            strategy=self._options.strategy_spec(self._settings),
            base_model=self._settings.serving.model,
            started=started,
            unfinished=stored,
        )
        if self._storage is not None:
            await self._storage.add(trajectory)
        return trajectory
