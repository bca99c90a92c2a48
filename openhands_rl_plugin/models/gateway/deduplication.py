"""Tells a retry from a new call, so that an answer is recorded once.

A request is a retry when a byte-identical one of the same session is on its way or was the last one answered, and

- it says so: ``x-stainless-retry-count`` above 0 (OpenAI's client), or the same ``idempotency-key``; or
- nobody waits for the first one's answer any more, or nobody received it.

Equal requests without any of these are samples of their own, as when a client asks for several answers at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from openhands_rl_plugin.models.gateway.replies import Reply

Waiting = Callable[[], bool]
"""Whether a client still waits for its answer."""

Digest = tuple[int, int]
"""The length and the hash of a request's body."""


@dataclass(eq=False, slots=True)
class PendingCall:
    """One call of the model server and all who wait for its answer."""

    digest: Digest
    key: str
    task: asyncio.Task[Reply]
    waiting: list[Waiting] = field(default_factory=list)
    delivered: bool = False

    def is_retried_by(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with the same body repeats this one."""
        if _says_retry(headers) or (self.key and self.key == headers.get("idempotency-key")):
            return True
        return not self.delivered if self.task.done() else not any(waits() for waits in self.waiting)


class PendingCalls:
    """The calls of one session that are on their way, and the last one that was answered and recorded."""

    def __init__(self) -> None:
        self._pending: list[PendingCall] = []
        self._last: PendingCall | None = None

    @property
    def busy(self) -> bool:
        """Whether a call is on its way."""
        return bool(self._pending)

    def join(
        self, body: bytes, headers: Mapping[str, str], waits: Waiting, ask: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> PendingCall:
        """The flight that answers this request: an earlier one when it is a retry, else a new one made by ``ask``."""
        # Keyed anew in every process, and unlike a digest of hashlib it does not give other threads the interpreter.
        digest = (len(body), hash(body))
        for call_in_flight in self._pending:
            if call_in_flight.digest == digest and call_in_flight.is_retried_by(headers):
                call_in_flight.waiting.append(waits)
                return call_in_flight
        if self._last is not None and self._last.digest == digest:
            if self._last.is_retried_by(headers):
                return self._last
            # A later retry will be one of the call that is made now.
            self._last = None
        call_in_flight = PendingCall(digest, headers.get("idempotency-key", ""), asyncio.create_task(ask()), [waits])
        self._pending.append(call_in_flight)
        call_in_flight.task.add_done_callback(lambda task: self._finish(call_in_flight))
        return call_in_flight

    async def settle(self, timeout: float | None = None) -> None:
        """Wait for the calls that are on their way; those that take longer than ``timeout`` seconds are given up."""
        while self._pending:
            _, late = await asyncio.wait([call_in_flight.task for call_in_flight in self._pending], timeout=timeout)
            for task in late:
                task.cancel()
            await asyncio.sleep(0)

    def _finish(self, call_in_flight: PendingCall) -> None:
        self._pending.remove(call_in_flight)
        # Who waits holds its whole request.
        call_in_flight.waiting.clear()
        if (
            not call_in_flight.task.cancelled()
            and call_in_flight.task.exception() is None
            and call_in_flight.task.result().recorded
        ):
            self._last = call_in_flight


def _says_retry(headers: Mapping[str, str]) -> bool:
    count = headers.get("x-stainless-retry-count", "")
    return count.isdecimal() and int(count) > 0
