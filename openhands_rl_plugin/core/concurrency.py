"""Coroutines for code that is synchronous, also where that code itself stands inside a running event loop.

OpenHands calls ``agent.step`` synchronously from a thread whose own loop is running, so a strategy's coroutine needs a
loop of its own: ``background()``, one for the process. A notebook's cell stands in a running loop, too.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openhands_rl_plugin.core.errors import InfrastructureError

# Every completion in flight holds a thread, because OpenHands' LLM is synchronous. Threads are made on demand.
MAX_COMPLETIONS_IN_FLIGHT = 256


class LoopThread:
    """An event loop in a daemon thread of its own, and threads for blocking calls made from it.

    Connections that belong to the loop live from one call to the next.
    """

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(MAX_COMPLETIONS_IN_FLIGHT, thread_name_prefix=f"{name}-blocking")
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def wait_for[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end and return its result. Blocks the calling thread; raises what ``work`` raises.

        An interrupt of the caller (Ctrl-C) cancels ``work`` and is raised when that has cleaned up.
        """
        job = Job(work, self.loop)
        try:
            return job.result()
        except KeyboardInterrupt:
            job.cancel()
            raise

    async def blocking[T](self, call: Callable[[], T]) -> T:
        """Run ``call`` in a thread of its own, with the caller's context variables."""
        return await self.loop.run_in_executor(self._threads, contextvars.copy_context().run, call)

    def close(self) -> None:
        """End the loop and its thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self._threads.shutdown(wait=False)


class Job[T]:
    """A coroutine on a loop of another thread, for a thread that waits for it and others that may cancel it."""

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
        """Cancel the work and block until it has cleaned up; does nothing when it has ended already."""
        # Cancelling the future would report the end at once; the task's own end comes after its clean-up.
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


async def shielded[T](work: Awaitable[T]) -> T:
    """Wait for ``work`` even when the caller is cancelled, however often; its exception takes precedence."""
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


async def on_loop[T](loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on ``loop``, which may be that of another thread. A caller that is cancelled cancels it.

    Raises what ``work`` raises, and ``InfrastructureError`` when the loop is closed.
    """
    if loop is asyncio.get_running_loop():
        return await work
    if loop.is_closed():
        work.close()
        raise InfrastructureError("the event loop of this episode was closed")
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


_lock = threading.Lock()
_current: LoopThread | None = None


def background() -> LoopThread:
    """The one of this process, made when it is first needed (also after a fork)."""
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = LoopThread("rl-strategies")
        return _current


@contextmanager
def bound[T](variable: contextvars.ContextVar[T | None], value: T) -> Iterator[T]:
    """Set a context variable to ``value`` until the end of the block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@dataclass(frozen=True)
class Backoff:
    """Pauses that double from ``first`` up to ``longest`` seconds.

    Each is varied at random by up to a quarter, so that clients which failed together do not come back together; the
    mean, and so the patience over several tries, is that of the plain sequence.
    """

    first: float
    longest: float

    def pause(self, failures: int) -> float:
        """Seconds to wait after failure number ``failures``, counted from 1."""
        # The exponent is bounded because a float is: 2**1024 overflows.
        plain = min(self.first * 2.0 ** min(failures - 1, 60), self.longest)
        return plain * random.uniform(0.75, 1.25)

    async def wait(self, failures: int, *, at_most: float = math.inf) -> None:
        """Sleep for ``pause(failures)``, but not longer than ``at_most`` seconds."""
        await asyncio.sleep(min(self.pause(failures), at_most))
