"""An event loop for code that is synchronous, wherever that code is called from."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import wait
from typing import Any


class LoopThread:
    """An event loop in a daemon thread of its own.

    So the caller may itself stand inside a running loop (Jupyter), and connections that belong to a loop live from one
    call to the next.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def wait_for[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end and return its result. Blocks the calling thread; raises what ``work`` raises.

        An interrupt of the caller (Ctrl-C) cancels ``work`` and goes on when that has cleaned up.
        """
        tasks: list[asyncio.Task[Any] | None] = []

        async def tracked() -> T:
            tasks.append(asyncio.current_task())
            return await work

        future = asyncio.run_coroutine_threadsafe(tracked(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            # Cancelling the future would report the end at once; the task's own end comes after its clean-up.
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks if task is not None])
            wait([future])
            raise

    def close(self) -> None:
        """End the loop and its thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
