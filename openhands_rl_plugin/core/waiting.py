"""Waiting for what must not be left half done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def to_the_end[T](work: Awaitable[T]) -> T:
    """Wait for ``work`` even when the caller is cancelled, however often; what it raises comes before that."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            # Unlike awaiting the task itself, this hands no cancellation on to it.
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
