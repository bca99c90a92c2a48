"""The worker's side: ``Worker`` as in a process of its own, whose queue and store are messages to the service."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from openhands_rl_plugin.contrib.rollouts.remote.messages import (
    AgainCall,
    Begin,
    CallAnswer,
    ClaimCall,
    EnteredCall,
    FindCall,
    FinishCall,
    FromActor,
    OwnedCall,
    ScoresCall,
    to_actor,
)
from openhands_rl_plugin.contrib.rollouts.states import ClaimedSession, Result, RolloutState
from openhands_rl_plugin.contrib.rollouts.worker import Worker
from openhands_rl_plugin.core.errors import RLError, StorageError, boundary
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectorySummary
from openhands_rl_plugin.core.types import FailureKind, Frozen, Score, Trajectory
from openhands_rl_plugin.hosts.pool.calls import Calls
from openhands_rl_plugin.hosts.pool.messages import Ready, Refused, Stored
from openhands_rl_plugin.hosts.pool.ray_cluster import Actor
from openhands_rl_plugin.hosts.pool.storage import PoolStorage

_Asks = Callable[[Callable[[int], FromActor]], Awaitable[CallAnswer]]
"""Sends the call that is made of a number, and returns the answer."""


class RemoteQueue:
    """The service's queue, for the worker's thread: ``ask`` is used on ``loop``, and a call waits for its answer.

    The owner is the one whom the service has started this worker as. Every method may raise ``StorageError``.
    """

    def __init__(self, ask: _Asks, loop: asyncio.AbstractEventLoop) -> None:
        self._ask = ask
        self._loop = loop

    def claim(self, owner: str) -> ClaimedSession | None:
        """As in ``JobQueue``."""
        return self._answer(lambda number: ClaimCall(number=number)).session

    def owned(self, owner: str) -> set[str]:
        """As in ``JobQueue``."""
        return set(self._answer(lambda number: OwnedCall(number=number)).owned)

    def entered(self, session: ClaimedSession, owner: str, state: RolloutState) -> None:
        """As in ``JobQueue``."""
        self._answer(lambda number: EnteredCall(number=number, session=session, state=state))

    def finish(self, session: ClaimedSession, owner: str, result: Result) -> bool:
        """As in ``JobQueue``."""
        return self._answer(lambda number: FinishCall(number=number, session=session, result=result)).stored

    def again(self, session: ClaimedSession, owner: str, *, delay: float, counts: bool = True) -> None:
        """As in ``JobQueue``."""
        self._answer(lambda number: AgainCall(number=number, session=session, delay=delay, counts=counts))

    def _answer(self, call: Callable[[int], FromActor]) -> CallAnswer:
        async def asked() -> CallAnswer:
            return await self._ask(call)

        return asyncio.run_coroutine_threadsafe(asked(), self._loop).result()


class RemoteStorage(PoolStorage):
    """The service's store, as far as an episode needs it. What would read more than single episodes is refused."""

    def __init__(self, send: Callable[[Frozen], Awaitable[None]], ask: _Asks) -> None:
        super().__init__(send)
        self._ask = ask

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """As in ``TrajectoryStorage``."""
        await self._ask(lambda number: ScoresCall(number=number, scores=tuple(scores)))

    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[tuple[Trajectory, tuple[Score, ...]]]:
        """As in ``TrajectoryStorage``, by ``ids``. Raises ``StorageError`` without them."""
        if where is None or where.ids is None:
            raise _refused("find without ids")
        for found in (await self._ask(lambda number: FindCall(number=number, where=where))).found:
            yield found.trajectory, found.scores

    async def summaries(self, where: TrajectoryFilter | None = None) -> AsyncIterator[TrajectorySummary]:
        """Raises ``StorageError``."""
        raise _refused("summaries")
        yield  # a generator, as in ``TrajectoryStorage``

    async def count(self, where: TrajectoryFilter | None = None) -> int:
        """Raises ``StorageError``."""
        raise _refused("count")

    async def close(self) -> None:
        """The service closes its store; the calls that wait here fail."""
        self.disconnect()


class RemoteService:
    """Queue and store of the service at the other end of ``send``. Create it on the event loop that it is used on."""

    def __init__(self, send: Callable[[Frozen], Awaitable[None]]) -> None:
        self._send = send
        self._calls = Calls[CallAnswer]()
        self.queue = RemoteQueue(self._ask, asyncio.get_running_loop())
        self.storage = RemoteStorage(send, self._ask)

    def answered(self, answer: CallAnswer | Stored) -> None:
        """Complete the call that ``answer`` belongs to."""
        if isinstance(answer, Stored):
            self.storage.answered(answer)
        else:
            self._calls.answered(answer.number, StorageError(answer.error) if answer.error else answer)

    async def _ask(self, call: Callable[[int], FromActor]) -> CallAnswer:
        return await self._calls.ask(lambda number: self._send(call(number)))


class RolloutActor(Actor):
    """One worker on the cluster."""

    def __init__(self) -> None:
        super().__init__()
        os.environ.setdefault("LOG_LEVEL", "ERROR")  # otherwise OpenHands logs every step
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        self._service: RemoteService | None = None
        self._stopped = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    async def receive(self, line: bytes) -> None:
        """Handle one message of the service. The worker runs in the background."""
        message = to_actor(line)
        if isinstance(message, Begin):
            self._service = RemoteService(self.send)
            self._work = asyncio.create_task(self._play(message, self._service))
        else:
            assert self._service is not None
            self._service.answered(message)

    async def close(self) -> None:
        """Give back what is not finished; returns when the queue has it."""
        self._stopped.set()
        if self._work is not None:
            await self._work

    async def _play(self, begin: Begin, service: RemoteService) -> None:
        orders = begin.orders
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "worker"):
                # What this machine lacks is said before it has claimed anything: the file, the variable with the key.
                await asyncio.to_thread(orders.service.options().settings)
                await self.send(Ready())
                await Worker(service.queue, begin.owner, orders, service.storage).run(self._stopped)
        except RLError as error:
            here = f"on {platform.node()}: {error}"
            await self.send(Refused(number=None, error=type(error).__name__, message=here))


def _refused(what: str) -> StorageError:
    return StorageError(f"a worker on a cluster reads single episodes of the service's store: no {what}")
