"""What a client is answered: a complete reply, or events while they are sampled; a retry gets the same answer.

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
from openhands_rl_plugin.session.wire import dump_object

JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response. ``recorded``: its content is stored, so a retry may get the same reply."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = False


class ErrorReply(RLError):
    """The request ends with this ``reply``: the model server did not answer, or the gateway has no room."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(str(reply.status))
        self.reply = reply


def error_reply(status: int, message: str, kind: str, headers: Mapping[str, str] | None = None) -> Reply:
    """An error of the gateway itself, in a format that clients of OpenAI and of Anthropic read."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return Reply(status=status, body=dump_object({"type": "error", "error": error}), headers=headers or {})


KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients ignore."""


class LiveAnswer:
    """The events of one answer so far. Any number of clients read it, each from the start: a retry misses nothing."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._more = asyncio.Event()
        self.headers: Mapping[str, str] = {}

    @property
    def begun(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._parts)

    def add(self, part: bytes) -> None:
        """Add what the clients get next."""
        if part:
            self._parts.append(part)
            self.wake()

    async def parts(self, task: asyncio.Task[object], silence: float) -> AsyncIterator[bytes]:
        """All parts until ``task`` has written the last; nothing for ``silence`` seconds is a ``KEEP_ALIVE``."""
        read = 0
        while True:
            more = self._more
            if read < len(self._parts):
                new, read = b"".join(self._parts[read:]), len(self._parts)
                yield new
            elif task.done():
                return
            elif not await _within(silence, more) and not task.done():
                yield KEEP_ALIVE

    async def wait(self, task: asyncio.Task[object], seconds: float) -> bool:
        """Whether anything can be read, or ``task`` is done, within so many seconds."""
        if not self.begun and not task.done():
            await _within(seconds, self._more)
        return self.begun or task.done()

    def wake(self) -> None:
        """Wake the readers: there is something to read, or the task that writes is done."""
        # A new one each time: who waits for the old one is woken, and nobody has to clear it.
        woken, self._more = self._more, asyncio.Event()
        woken.set()


async def _within(seconds: float, more: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await more.wait()
    except TimeoutError:
        return False


Waiting = Callable[[], bool]
"""Whether a client still waits for its answer."""

Digest = tuple[str, int, int]
"""The path of a request, and the length and the hash of its body."""


@dataclass(eq=False, slots=True)
class PendingCall:
    """One request to the model server and the clients that wait for its response."""

    digest: Digest
    key: str
    task: asyncio.Task[Reply]
    live: LiveAnswer
    waiting: list[Waiting] = field(default_factory=list)
    delivered: bool = False

    def is_retried_by(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with the same body repeats this one."""
        if _is_marked_retry(headers) or (self.key and self.key == headers.get("idempotency-key")):
            return True
        return not self.delivered if self.task.done() else not any(waits() for waits in self.waiting)


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
        waits: Waiting,
        ask: Callable[[LiveAnswer], Coroutine[Any, Any, Reply]],
    ) -> PendingCall:
        """The call that answers this request: the earlier one of a retry, else a new one that runs ``ask``.

        ``ask`` gets the place for the events of a streamed answer.
        """
        # ``hash`` has a new key in every process; unlike hashlib, it does not release the GIL.
        digest = (path, len(body), hash(body))
        for call_in_flight in self._pending:
            if call_in_flight.digest == digest and call_in_flight.is_retried_by(headers):
                call_in_flight.waiting.append(waits)
                return call_in_flight
        if self._last is not None and self._last.digest == digest:
            if self._last.is_retried_by(headers):
                return self._last
            # A later retry belongs to the call that starts now.
            self._last = None
        live = LiveAnswer()
        task = asyncio.create_task(ask(live))
        call_in_flight = PendingCall(digest, headers.get("idempotency-key", ""), task, live, [waits])
        self._pending.append(call_in_flight)
        task.add_done_callback(lambda _: live.wake())
        task.add_done_callback(lambda _: self._finish(call_in_flight))
        return call_in_flight

    async def settle(self, timeout: float | None = None) -> None:
        """Wait for the calls in flight; cancel those that take longer than ``timeout`` seconds."""
        while self._pending:
            _, late = await asyncio.wait([call_in_flight.task for call_in_flight in self._pending], timeout=timeout)
            for task in late:
                task.cancel()
            await asyncio.sleep(0)

    def _finish(self, call_in_flight: PendingCall) -> None:
        self._pending.remove(call_in_flight)
        # Each waiting callback keeps its whole request in memory.
        call_in_flight.waiting.clear()
        if (
            not call_in_flight.task.cancelled()
            and call_in_flight.task.exception() is None
            and call_in_flight.task.result().recorded
        ):
            self._last = call_in_flight


def _is_marked_retry(headers: Mapping[str, str]) -> bool:
    count = headers.get("x-stainless-retry-count", "")
    return count.isascii() and count.isdecimal() and count.strip("0") != ""
