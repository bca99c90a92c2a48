"""Keeps the service going: starts workers again, takes what dead ones had, tells clients, drops what is old."""

from __future__ import annotations

import asyncio
import time

import httpx

from openhands_rl_plugin.contrib.rollouts.callbacks import send_due
from openhands_rl_plugin.contrib.rollouts.owners import release_dead, remove_dead
from openhands_rl_plugin.contrib.rollouts.places import Place, worker_starter
from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.worker import Orders
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.redaction import redacting_logger

_LOG = redacting_logger(__name__)
_PAUSE = 0.5
_HOUR = 3600.0


class Keeper:
    """Of one service. ``orders`` are those of its workers."""

    def __init__(self, queue: JobQueue, orders: Orders) -> None:
        self._queue = queue
        self._orders = orders
        self._folder = orders.folder
        self._keep = orders.service.keep_hours * _HOUR
        self._forgot = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        async with (
            httpx.AsyncClient(timeout=10.0, follow_redirects=False, trust_env=False) as client,
            worker_starter(self._queue, self._orders) as start,
        ):
            places = [Place(start) for _ in range(self._orders.service.workers)]
            try:
                while True:
                    for place in places:
                        await place.keep()
                    await self._look(client)
                    await asyncio.sleep(_PAUSE)
            finally:
                await asyncio.gather(*(place.stop() for place in places))

    async def _look(self, client: httpx.AsyncClient) -> None:
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
