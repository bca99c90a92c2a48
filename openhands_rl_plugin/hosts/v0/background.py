"""Runs coroutines for code that is synchronous but stands inside somebody else's running event loop.

OpenHands calls ``agent.step`` synchronously from a thread whose own loop is running, so a strategy's coroutine needs a
loop of its own: one for the process, in a daemon thread, made when it is first needed (also after a fork).
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from openhands_rl_plugin.errors import InfrastructureError

# Every completion in flight holds a thread, because OpenHands' LLM is synchronous. Threads are made on demand.
MAX_COMPLETIONS_IN_FLIGHT = 256

_LOOK_UP = 1.0


class Background:
    """An event loop in a thread, and threads for blocking calls made from it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._threads = ThreadPoolExecutor(MAX_COMPLETIONS_IN_FLIGHT, thread_name_prefix="rl-completion")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="rl-strategies", daemon=True).start()

    def wait_for[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end and return its result. Blocks the calling thread; raises what ``work`` raises."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def blocking[T](self, call: Callable[[], T]) -> T:
        """Run ``call`` in a thread of its own, with the caller's context variables."""
        return await self.loop.run_in_executor(self._threads, contextvars.copy_context().run, call)


def wait_on[T](loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on somebody else's loop, from another thread, and return its result. Blocks.

    Raises what the coroutine raises, and ``InfrastructureError`` when the loop is closed before it has ended.
    """
    if not loop.is_closed():
        future = asyncio.run_coroutine_threadsafe(make(), loop)
        # A loop that is stopped drops its work without a word, and this thread would keep the process from ending.
        while not wait([future], timeout=_LOOK_UP).done and not loop.is_closed():
            pass
        if future.done():
            return future.result()
    raise InfrastructureError("the event loop that plays this episode was closed")


_lock = threading.Lock()
_current: Background | None = None


def background() -> Background:
    """The one of this process."""
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = Background()
        return _current
