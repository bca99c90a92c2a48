"""Keeps the service going: starts workers again, takes what dead ones had, tells clients, drops what is old."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from contextlib import suppress

import httpx

from openhands_rl_plugin.apps.rollout.service.callbacks import send_due
from openhands_rl_plugin.apps.rollout.service.owners import release_dead, remove_dead
from openhands_rl_plugin.apps.rollout.service.queue import JobQueue
from openhands_rl_plugin.apps.rollout.service.worker import Orders
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.redaction import redacting_logger

_LOG = redacting_logger(__name__)
_MODULE = "openhands_rl_plugin.apps.rollout.service.worker"
_PAUSE = 0.5
_OFTEN = 10.0
"""Seconds; who dies sooner is started later."""
_LONGEST_WAIT = 30.0
_STOP_SECONDS = 20.0
_HOUR = 3600.0


class _Place:
    """One worker process after the other."""

    def __init__(self, orders: bytes) -> None:
        self._orders = orders
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=5)
        self._started = 0.0
        self._wait = 0.0

    async def keep(self) -> None:
        """Start a process where none runs."""
        process, now = self._process, time.monotonic()
        if process is not None and process.returncode is None:
            return
        if process is not None:
            last = self._lines[-1][:300] if self._lines else ""
            _LOG.error("a worker ended (%s) %s; another one is started", process.returncode, last)
            self._wait = min(_LONGEST_WAIT, 2 * self._wait + 1) if now - self._started < _OFTEN else 0.0
            self._process = None
        if now - self._started < self._wait:
            return
        self._started = now
        await self._start()

    async def _start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE), stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            _LOG.error("no worker could be started: %s", error)
            return
        self._process = process
        self._reader = asyncio.create_task(self._read(process))
        assert process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(self._orders)
            await process.stdin.drain()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while chunk := await process.stdout.read(65536):
            self._lines.extend(line for line in chunk.decode("utf-8", "replace").splitlines() if line.strip())

    async def stop(self) -> None:
        """Close its stdin, which ends it; kill it if it does not end."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            await self._reader


class Keeper:
    """Of one service. ``orders`` are those of its workers."""

    def __init__(self, queue: JobQueue, orders: Orders) -> None:
        self._queue = queue
        self._folder = orders.folder
        self._keep = orders.service.keep_hours * _HOUR
        line = orders.model_dump_json().encode() + b"\n"
        self._places = [_Place(line) for _ in range(orders.service.workers)]
        self._forgot = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        async with httpx.AsyncClient(timeout=10.0, follow_redirects=False, trust_env=False) as client:
            try:
                while True:
                    await self._look(client)
                    await asyncio.sleep(_PAUSE)
            finally:
                await asyncio.gather(*(place.stop() for place in self._places))

    async def _look(self, client: httpx.AsyncClient) -> None:
        for place in self._places:
            await place.keep()
        try:
            await asyncio.to_thread(release_dead, self._queue, self._folder)
            await send_due(self._queue, client)
            if time.monotonic() - self._forgot > _HOUR or not self._forgot:
                self._forgot = time.monotonic()
                await asyncio.to_thread(remove_dead, self._folder)
                while await asyncio.to_thread(self._queue.forget_before, time.time() - self._keep):
                    pass
        except StorageError as error:
            _LOG.error("%s", error)
