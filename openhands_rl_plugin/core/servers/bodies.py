"""Bodies of requests: how much JSON one may have, and reading long ones beside the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from openhands_rl_plugin.core.servers.door import Refusal

MOST_VALUES = 200_000
"""Values and commas in texts, of one body: a microsecond each to read, and a third of a second in all."""
_FEW_VALUES = 2000
_LONG = 256 * 1024


def values_of(body: bytes) -> int:
    """How many values a JSON text has at most; what looks like one in a string counts."""
    return body.count(b",") + body.count(b"[") + body.count(b"{") + 1


def too_many_values(body: bytes) -> Refusal | None:
    """Why a body is not read, ``None`` if it is."""
    if values_of(body) <= MOST_VALUES:
        return None
    message = f"The request body has more than {MOST_VALUES} values, or commas in its texts."
    return Refusal(413, "BadRequestError", message)


class BodyReader:
    """Reads bodies: short ones at once, long ones in a thread, one at a time and with pauses for all else.

    A pause is as long as the reading was: JSON is read by libraries that let no other thread run meanwhile. For one
    event loop.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def read[T](self, body: bytes, parse: Callable[[bytes], T]) -> T:
        """What ``parse`` makes of ``body``; its errors pass through."""
        if len(body) <= _LONG and values_of(body) <= _FEW_VALUES:
            return parse(body)
        await self._one.acquire()
        started = time.monotonic()
        try:
            return await asyncio.to_thread(parse, body)
        finally:
            asyncio.get_running_loop().call_later(time.monotonic() - started, self._one.release)
