"""The service's side of a worker elsewhere: holds its lock, and does for it what it asks of queue and store."""

from __future__ import annotations

import asyncio
import time

from openhands_rl_plugin.contrib.rollouts.owners import living_owner
from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.remote.messages import (
    Begin,
    CallAnswer,
    FindCall,
    FromActor,
    QueueCall,
    ScoresCall,
    StoreCall,
    from_actor,
)
from openhands_rl_plugin.contrib.rollouts.worker import Orders
from openhands_rl_plugin.core.errors import InfrastructureError, RLError, StorageError, boundary, describe
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.hosts.pool.connection import WorkerChannel
from openhands_rl_plugin.hosts.pool.messages import Ready, Refused, Store, Stored, to_line

_LOG = redacting_logger(__name__)
_LATE = 60.0
"""Seconds after which it is said that a worker still waits for a processor of the cluster."""


class RemoteWorker:
    """The worker at the end of ``channel``, as an owner of episodes until it is gone. Create it on the event loop.

    Whatever it has sent is written before its lock is free: who plays its episodes again finds all of it, and nothing
    of the dead one comes later. When this process is killed, the kernel frees the lock.
    """

    def __init__(self, channel: WorkerChannel, orders: Orders, queue: JobQueue, storage: TrajectoryStorage) -> None:
        self._channel = channel
        self._orders = orders
        self._queue = queue
        self._storage = storage
        self._answering: set[asyncio.Task[None]] = set()
        self._refusal = ""
        self._ready_at: float | None = None
        self._serving = asyncio.create_task(self._serve())
        self.ended: str | None = None

    @property
    def seconds(self) -> float:
        """How long it has been ready to play."""
        return 0.0 if self._ready_at is None else time.monotonic() - self._ready_at

    async def stop(self) -> None:
        """Let it give back what it plays, then end it."""
        if self._ready_at is None:
            self._channel.kill()  # it has nothing, and may wait for a processor
        else:
            await self._channel.close()
        await self._serving

    async def _serve(self) -> None:
        late = asyncio.get_running_loop().call_later(_LATE, self._say_that_it_waits)
        try:
            with living_owner(self._orders.folder) as owner:
                why = await self._relay(owner)
        except StorageError as error:
            self._channel.kill()
            why = str(error)
        late.cancel()
        self.ended = self._refusal or why

    async def _relay(self, owner: str) -> str:
        """Until the worker is gone; why it is."""
        try:
            await self._channel.send(to_line(Begin(owner=owner, orders=self._orders)))
            while lines := await self._channel.receive():
                for line in lines:
                    self._take(from_actor(line), owner)
            return await self._channel.exit_message()
        except InfrastructureError as error:
            return str(error)
        finally:
            self._channel.kill()
            await asyncio.gather(*self._answering)

    def _take(self, message: FromActor, owner: str) -> None:
        if isinstance(message, Ready):
            self._ready_at = time.monotonic()
        elif isinstance(message, Refused):
            self._refusal = message.message
            self._channel.kill()
        else:
            answering = asyncio.create_task(self._answer(message, owner))
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)

    async def _answer(self, message: Store | QueueCall | StoreCall, owner: str) -> None:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rollout.service"):
                answer = await self._made(message, owner)
        except RLError as error:
            kind = Stored if isinstance(message, Store) else CallAnswer
            answer = kind(number=message.number, error=str(error) or describe(error))
        await self._channel.send(to_line(answer))

    async def _made(self, message: Store | QueueCall | StoreCall, owner: str) -> Stored | CallAnswer:
        if isinstance(message, Store):
            return await message.write_to(self._storage)
        if isinstance(message, ScoresCall | FindCall):
            return await message.read(self._storage)
        return await asyncio.to_thread(message.ask, self._queue, owner)

    def _say_that_it_waits(self) -> None:
        if self._ready_at is None:
            _LOG.warning("a worker has waited %d s for a free CPU of the Ray cluster; see `ray status`", _LATE)
