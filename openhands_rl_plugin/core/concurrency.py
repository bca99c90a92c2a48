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
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from typing import Any

# Every completion in flight holds a thread, because OpenHands' LLM is synchronous. Threads are made on demand.
MAX_COMPLETIONS_IN_FLIGHT = 256


class Background:
    """An event loop in a thread, and threads for blocking calls made from it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._threads = ThreadPoolExecutor(MAX_COMPLETIONS_IN_FLIGHT, thread_name_prefix="rl-completion")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="rl-strategies", daemon=True).start()

    def start[T](self, work: Coroutine[Any, Any, T]) -> Job[T]:
        """Begin ``work``, for a thread that waits for it and others that may cancel it."""
        return Job(work, self.loop)

    def wait_for[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end and return its result. Blocks the calling thread; raises what ``work`` raises."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def blocking[T](self, call: Callable[[], T]) -> T:
        """Run ``call`` in a thread of its own, with the caller's context variables."""
        return await self.loop.run_in_executor(self._threads, contextvars.copy_context().run, call)


class Job[T]:
    """A coroutine on a loop of another thread. ``cancel`` returns when the coroutine has cleaned up."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False
        self._future = asyncio.run_coroutine_threadsafe(self._run(work), loop)

    def result(self) -> T:
        """Block until the work has ended. Raises what it raises, and ``asyncio.CancelledError``."""
        try:
            return self._future.result()
        except CancelledError as error:
            # That of threads is an ordinary exception, which a boundary would take for a failure.
            raise asyncio.CancelledError from error

    def cancel(self) -> None:
        """End the work and block until it has; does nothing when it has ended already."""
        self._loop.call_soon_threadsafe(self._cancel)
        wait([self._future])

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.ensure_future(work)
        if self._cancelled:
            self._task.cancel()
        return await self._task


_lock = threading.Lock()
_current: Background | None = None


def background() -> Background:
    """The one of this process."""
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = Background()
        return _current
