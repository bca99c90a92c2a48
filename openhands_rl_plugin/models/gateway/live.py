"""An answer that clients read while it is still sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

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
            self._wake()

    def end(self) -> None:
        """Wake the readers for the last time."""
        self._wake()

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
            else:
                await _either(task, more, silence)
                if read == len(self._parts) and not task.done() and not more.is_set():
                    yield KEEP_ALIVE

    async def wait(self, task: asyncio.Task[object], seconds: float) -> bool:
        """Whether anything can be read, or ``task`` is done, within so many seconds."""
        if not self.begun and not task.done():
            await _either(task, self._more, seconds)
        return self.begun or task.done()

    def _wake(self) -> None:
        # A new one each time: who waits for the old one is woken, and nobody has to clear it.
        woken, self._more = self._more, asyncio.Event()
        woken.set()


async def _either(task: asyncio.Task[object], more: asyncio.Event, seconds: float) -> None:
    waiting = asyncio.ensure_future(more.wait())
    try:
        await asyncio.wait({task, waiting}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
