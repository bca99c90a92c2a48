"""What clients are answered, and which of them wait for the same answer.

A request is a retry when a byte-identical one of the same session is in flight or was the last one answered, and

- its headers mark it as one: ``x-stainless-retry-count`` above 0 (OpenAI's client), or the same ``idempotency-key``; or
- all clients of the first request have disconnected, or its response was not delivered.

Other identical requests are separate samples, for example when a client sends several requests at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from openhands_rl_plugin.core.errors import RLError


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response. ``recorded``: its content is stored, so a retry may get the same reply."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = False


class ErrorReply(RLError):
    """The request ends with this error of the gateway itself; ``status`` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class PendingCall:
    """A request to the model server. Any number of clients read the events of its answer, each from the start.

    ``left``: for each client, what is done when it has left. ``headers``: those of a streamed response.
    """

    digest: tuple[str, int, int]
    key: str
    left: list[asyncio.Future[Any]]
    task: asyncio.Task[Reply] = field(init=False)
    delivered: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    _parts: list[bytes] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def begun(self) -> bool:
        """Whether an event came."""
        return bool(self._parts)

    def add(self, part: bytes) -> None:
        """Add what the clients get next."""
        if part:
            self._parts.append(part)
            self.wake()

    async def parts(self, silence: float | None, filler: bytes) -> AsyncIterator[bytes]:
        """All events until the task has written the last, and ``filler`` after ``silence`` seconds without one."""
        read = 0
        while True:
            more = self._more
            if new := b"".join(self._parts[read:]):
                read = len(self._parts)
                yield new
            elif self.task.done():
                return
            else:
                try:
                    async with asyncio.timeout(silence):
                        await more.wait()
                except TimeoutError:
                    yield filler

    def is_retried_by(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with the same body repeats this one."""
        count = headers.get("x-stainless-retry-count", "")
        if count.isascii() and count.isdecimal() and count.strip("0"):
            return True
        if self.key and self.key == headers.get("idempotency-key"):
            return True
        return not self.delivered if self.task.done() else all(left.done() for left in self.left)

    def wake(self) -> None:
        """Wake the readers: there is something to read, or the task is done."""
        # A new one each time: who waits for the old one is woken, and nobody has to clear it.
        woken, self._more = self._more, asyncio.Event()
        woken.set()


class PendingCalls:
    """The requests of one session that are in flight, and the last one that was recorded."""

    def __init__(self) -> None:
        self._pending: list[PendingCall] = []
        self._last: PendingCall | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is in flight."""
        return bool(self._pending)

    def join(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        left: asyncio.Future[Any],
        ask: Callable[[PendingCall], Coroutine[Any, Any, Reply]],
    ) -> PendingCall:
        """The call that answers this request: the earlier one of a retry, else a new one that runs ``ask``."""
        # ``hash`` has a new key in every process; unlike hashlib, it does not release the GIL.
        digest = (path, len(body), hash(body))
        for call in (*self._pending, *([self._last] if self._last else ())):
            if call.digest == digest and call.is_retried_by(headers):
                call.left += [] if call.task.done() else [left]
                return call
        if self._last is not None and self._last.digest == digest:
            self._last = None  # a later retry belongs to the call that starts now
        call = PendingCall(digest, headers.get("idempotency-key", ""), [left])
        self._pending.append(call)
        call.task = asyncio.create_task(ask(call))
        call.task.add_done_callback(lambda task: self._finish(call, task))
        return call

    async def settle(self, timeout: float | None = None) -> None:
        """Wait for the calls in flight; cancel those that take longer than ``timeout`` seconds."""
        while self._pending:
            _, late = await asyncio.wait([call.task for call in self._pending], timeout=timeout)
            for task in late:
                task.cancel()
            await asyncio.sleep(0)

    def _finish(self, call: PendingCall, task: asyncio.Task[Reply]) -> None:
        self._pending.remove(call)
        call.left.clear()  # each keeps its whole request in memory
        if not task.cancelled() and task.exception() is None and task.result().recorded:
            self._last = call
        call.wake()
