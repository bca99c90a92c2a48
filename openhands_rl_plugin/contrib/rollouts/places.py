"""Where workers run: each place has one worker after the other, in a process of this machine or in a Ray actor."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.remote.actor import RolloutActor
from openhands_rl_plugin.contrib.rollouts.remote.relay import RemoteWorker
from openhands_rl_plugin.contrib.rollouts.worker import Orders, store_in
from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.hosts.pool.ray_cluster import started_actor

_LOG = redacting_logger(__name__)
_MODULE = "openhands_rl_plugin.contrib.rollouts.worker"
_OFTEN = 10.0
"""Seconds; who dies sooner is started later."""
_LONGEST_WAIT = 30.0
_STOP_SECONDS = 20.0


class StartedWorker(Protocol):
    """A worker, which plays by itself."""

    @property
    def ended(self) -> str | None:
        """Why it is gone; ``None`` while it is not."""
        ...

    @property
    def seconds(self) -> float:
        """How long it has been at work."""
        ...

    async def stop(self) -> None:
        """Let it give back what it plays; kill it if it does not end."""
        ...


StartsWorker = Callable[[], Awaitable[StartedWorker]]
"""Raises ``InfrastructureError``."""


class Place:
    """One worker after the other."""

    def __init__(self, start: StartsWorker) -> None:
        self._start = start
        self._worker: StartedWorker | None = None
        self._wait = 0.0
        self._not_before = 0.0

    async def keep(self) -> None:
        """Start a worker where none is."""
        worker = self._worker
        if worker is not None:
            if worker.ended is None:
                return
            _LOG.error("a worker ended: %s; another one is started", worker.ended)
            self._worker = None
            self._pause(worker.seconds)
        if time.monotonic() < self._not_before:
            return
        try:
            self._worker = await self._start()
        except InfrastructureError as error:
            _LOG.error("%s", error)
            self._pause(0.0)

    async def stop(self) -> None:
        """End its worker."""
        if self._worker is not None and self._worker.ended is None:
            await self._worker.stop()

    def _pause(self, seconds: float) -> None:
        self._wait = min(_LONGEST_WAIT, 2 * self._wait + 1) if seconds < _OFTEN else 0.0
        self._not_before = time.monotonic() + self._wait


class WorkerProcess:
    """A worker in a process of this machine. Create it with ``start``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._began = time.monotonic()
        self._lines: deque[str] = deque(maxlen=5)
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, orders: bytes) -> WorkerProcess:
        """Start a process. Raises ``InfrastructureError``."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE), stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise InfrastructureError(f"no worker could be started: {error}") from error
        worker = cls(process)
        assert process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(orders)
            await process.stdin.drain()
        return worker

    @property
    def ended(self) -> str | None:
        """As in ``StartedWorker``."""
        if self._process.returncode is None:
            return None
        return f"({self._process.returncode}) {self._lines[-1][:300] if self._lines else ''}".rstrip()

    @property
    def seconds(self) -> float:
        """As in ``StartedWorker``."""
        return time.monotonic() - self._began

    async def stop(self) -> None:
        """Close its stdin, which ends it; kill it if it does not end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while chunk := await self._process.stdout.read(65536):
            self._lines.extend(line for line in chunk.decode("utf-8", "replace").splitlines() if line.strip())


@asynccontextmanager
async def worker_starter(queue: JobQueue, orders: Orders) -> AsyncIterator[StartsWorker]:
    """What starts a worker of the kind that the options name. With Ray this process alone writes the store."""
    if orders.service.executor == "processes":
        line = orders.model_dump_json().encode() + b"\n"
        yield lambda: WorkerProcess.start(line)
        return
    storage = store_in(orders.folder)

    async def start() -> StartedWorker:
        channel = await asyncio.to_thread(started_actor, RolloutActor, close_timeout=_STOP_SECONDS)
        return RemoteWorker(channel, orders, queue, storage)

    try:
        yield start
    finally:
        await storage.close()
