"""Outages of the model server: callers wait until it is available again, instead of collecting failed episodes.

A server is unavailable when it does not respond, or its proxy responds with 429, 502, 503 or 504.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import httpx

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import InfrastructureError, PublishError
from openhands_rl_plugin.core.protocols import EpisodeRunner
from openhands_rl_plugin.core.types import Adapter, EpisodeRequest, FailureKind, Probe, Trajectory

if TYPE_CHECKING:
    from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher, PublishReport

_BACKOFF = Backoff(first=0.5, longest=15.0)  # short beside the time that a server needs to load a model
_MODEL_SERVER = frozenset({FailureKind.INFRASTRUCTURE, FailureKind.MODEL})


class OutageTolerantServer:
    """The server of a publisher. ``patience`` is in seconds.

    ``tell`` is called with the cause of a wait, and with ``""`` at its end.

    A restarted server has lost its adapters, so the health check publishes the version in use again. While only the
    base model is in use, any response is enough.
    """

    def __init__(self, publisher: AdapterPublisher, patience: float, tell: Callable[[str], None]) -> None:
        self.outages = 0
        """Number of outages so far."""
        self._publisher = publisher
        self._patience = patience
        self._tell = tell
        self._adapter: Adapter | None = None
        self._there = asyncio.Event()
        self._there.set()
        self._turn = asyncio.Lock()
        self._checked = -1.0

    async def publish(self, adapter: Adapter, probe: Probe | None = None) -> PublishReport:
        """As ``AdapterPublisher.publish``, as soon as the server is available.

        Raises ``InfrastructureError`` when it is unavailable for longer than ``patience``, ``PublishError`` when the
        server refuses.
        """
        async with self._turn:
            report = await self._answer(lambda: self._publisher.publish(adapter, probe))
            self._adapter = adapter
            return report

    async def available(self) -> None:
        """Return at once unless the server is known to be unavailable; then wait for it."""
        await self._there.wait()

    async def check(self) -> None:
        """Wait until it responds and has the version in use loaded, if there is one. Raises as ``publish`` does."""
        asked = time.monotonic()
        async with self._turn:
            # Another caller may have checked while this one waited for the lock.
            if self._checked >= asked:
                return
            started = time.monotonic()
            if (adapter := self._adapter) is None:
                await self._answer(self._publisher.loaded)
            else:
                await self._answer(lambda: self._publisher.publish(adapter))
            self._checked = started

    async def _answer[T](self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of ``ask``, retried until the server responds."""
        deadline, failures = time.monotonic() + self._patience, 0
        while True:
            try:
                answer = await ask()
            except PublishError as error:
                if not isinstance(error.__cause__, httpx.TransportError | httpx.HTTPStatusError):
                    raise
                self._note_away(str(error))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise InfrastructureError(
                        f"the model server was unavailable for {self._patience:g} s ([rl.loop] patience): {error}. "
                        "Episodes and trained weights are kept: start the server, then the same command again"
                    ) from error
                failures += 1
                await _BACKOFF.wait(failures, at_most=left)
            else:
                if not self._there.is_set():
                    self._there.set()
                    self._tell("")
                return answer

    def _note_away(self, why: str) -> None:
        if self._there.is_set():
            self._there.clear()
            self.outages += 1
        self._tell(why)


class OutageTolerantRunner:
    """An ``EpisodeRunner`` that starts no episode during an outage.

    An episode that failed because of the server is returned after the outage.
    """

    def __init__(self, runner: EpisodeRunner, server: OutageTolerantServer) -> None:
        self._runner = runner
        self._server = server

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run one episode. Raises ``InfrastructureError`` when the server stays unavailable."""
        await self._server.available()
        trajectory = await self._runner.run(request)
        if trajectory.failure is not None and trajectory.failure.kind in _MODEL_SERVER:
            await self._server.check()
        return trajectory

    async def close(self) -> None:
        """Close the wrapped runner."""
        await self._runner.close()
