"""Runs a host's episodes in several workers, each with many sessions: one process is limited by its interpreter lock.

Workers are new Python processes, not forks, so they inherit no state. They get the settings and read secrets
from the environment variables that the settings name.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import InfrastructureError, describe
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, FailureKind, StopReason, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.pool.connection import WorkerChannel, WorkerConnection, framed, read_message
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.rollout.journal import stored_episode
from openhands_rl_plugin.rollout.session import failed_episode

# Seconds beyond an episode's time limit, which the worker enforces: to open, close and store the session.
_TIME_BEYOND_LIMIT = 60.0
# A worker holds half a gigabyte, and starts anew in ten seconds: it does not wait through a training step, or beside
# the pool of an evaluation.
IDLE_TIMEOUT = 60.0
"""Seconds without an episode after which the workers are ended."""


class WorkerPoolRunner:
    """An ``EpisodeRunner`` over ``workers`` processes of this machine.

    ``options.sessions`` limits the sessions of each process (default: ``[rl] max_workers`` divided by ``workers``).
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
        idle_timeout: float = IDLE_TIMEOUT,
    ) -> None:
        options = options or HostOptions()
        sessions = options.sessions or max(1, settings.max_workers // workers)
        self._settings = settings
        self._options = options.model_copy(update={"sessions": sessions})
        self._storage = storage
        self._free_sessions = asyncio.Semaphore(workers * sessions)
        self._workers: list[WorkerConnection | None] = [None] * workers
        self._starting = asyncio.Lock()
        self._idle_timeout = idle_timeout
        self._episodes = 0
        self._idle_since = time.monotonic()
        self._idle: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        async with self._free_sessions:
            started = time.time()
            self._episodes += 1
            try:
                worker = await self._least_busy()
                return await worker.run(request, workspace, timeout=self._timeout(request))
            except InfrastructureError as error:
                return await self._failed(request, error, started)
            finally:
                self._episodes -= 1
                self._idle_since = time.monotonic()
                if self._idle is None or self._idle.done():
                    self._idle = asyncio.create_task(self._end_when_idle())

    async def close(self) -> None:
        """End the workers and the episodes that they run."""
        self._closed.set()
        if self._idle is not None:
            await self._idle
        await self._end_workers()

    async def _end_workers(self) -> None:
        workers = [worker for worker in self._workers if worker is not None]
        await asyncio.gather(*(worker.close() for worker in workers))
        self._workers = [None] * len(self._workers)

    async def _end_when_idle(self) -> None:
        """Returns while an episode runs: its end starts this again."""
        while not (self._episodes or self._closed.is_set()):
            left = self._idle_since + self._idle_timeout - time.monotonic()
            if left > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), left)
                continue
            # An episode that comes meanwhile waits for this, and starts workers anew.
            async with self._starting:
                if not self._episodes:
                    await self._end_workers()
                return

    async def _connect(self) -> WorkerChannel:
        """Start a worker; returns before it is ready. Raises ``InfrastructureError``."""
        return await ProcessChannel.start()

    async def _least_busy(self) -> WorkerConnection:
        async with self._starting:
            for index, worker in enumerate(self._workers):
                if worker is not None and worker.alive:
                    continue
                if worker is not None:
                    await worker.close()
                channel = await self._connect()
                self._workers[index] = WorkerConnection(channel, self._settings, self._options, self._storage)
        # If the worker has died since, it returns an error for the episode.
        return min((worker for worker in self._workers if worker is not None), key=lambda worker: worker.load)

    def _timeout(self, request: EpisodeRequest) -> float | None:
        limits = request.task.limits or self._settings.limits()
        return None if limits.timeout is None else limits.timeout + _TIME_BEYOND_LIMIT

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


_MODULE = "openhands_rl_plugin.hosts.pool.worker"
CLOSE_TIMEOUT = 10.0
"""Seconds for a worker to close its sessions; one takes up to five (``_CLOSE_TIMEOUT`` of a host's runner)."""

# Lines of stderr. A traceback ends with its cause, so a few are enough.
_KEPT_LINES = 20


class ProcessChannel:
    """A ``WorkerChannel`` to a child process. Create it with ``start``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._error_reader = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(cls) -> ProcessChannel:
        """Start a process. Raises ``InfrastructureError``."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _MODULE), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise InfrastructureError(f"no worker process could be started: {error}") from error
        return cls(process)

    async def send(self, message: bytes) -> None:
        """As in ``WorkerChannel``."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._stdin.write(framed(message))
            await self._stdin.drain()

    async def receive(self) -> Sequence[bytes]:
        """As in ``WorkerChannel``, one message at a time."""
        message = await read_message(self._stdout)
        return (message,) if message else ()

    async def exit_message(self) -> str:
        """As in ``WorkerChannel``: the signal, or the status and the last line of stderr."""
        status = await self._process.wait()
        await self._error_reader
        if status < 0 or not self._last_lines:
            return f"a worker process was ended by signal {-status}" if status else "a worker process ended"
        return f"a worker process ended with status {status}: {self._last_lines[-1][:300]!r}"

    def kill(self) -> None:
        """As in ``WorkerChannel``."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Close its stdin, which ends it; kill it if it does not end."""
        self._stdin.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(65536):
            self._last_lines.extend(line for line in chunk.decode("utf-8", "replace").splitlines() if line.strip())
