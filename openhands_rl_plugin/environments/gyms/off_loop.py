"""Runs foreign, blocking code beside the event loop, for a bounded time, with typed failures."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError, RLError, boundary, describe
from openhands_rl_plugin.core.types import FailureKind


async def off_loop[T](call: Callable[[], T], what: str, seconds: float) -> T:
    """The result of ``call``, made in a thread of its own.

    Raises ``EpisodeError`` for whatever ``call`` raises, and ``InfrastructureError`` after ``seconds``: the thread then
    goes on by itself, because Python cannot end it, so what it works on must not be used again.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # so that nobody cancels it before the thread ends

    def run() -> None:
        try:
            with boundary(FailureKind.ENVIRONMENT, what):
                result = call()
        except RLError as error:
            done.set_exception(error)
        except SystemExit as error:
            done.set_exception(BadEnvironmentError(f"{what} asked its process to end: {describe(error)}"))
        else:
            done.set_result(result)

    # A daemon, so that a call that hangs does not keep the process from ending.
    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(done)
    except TimeoutError as error:
        raise InfrastructureError(
            f"{what} did not return within {seconds:g} s: raise timeout in [rl.environment], or mend the environment"
        ) from error


_GLOBAL_GENERATORS = threading.Lock()


class PrivateRandom:
    """Python's and NumPy's global random generators, as one episode sees them: its own, from its own seed.

    Code that draws from ``random`` would otherwise disturb, and be disturbed by, the other episodes of the process.
    """

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None
        self._seed = seed

    def copy(self) -> PrivateRandom:
        """An independent one in the same state."""
        twin = PrivateRandom(self._seed)
        twin._python, twin._numpy = self._python, self._numpy
        return twin

    @contextmanager
    def active(self) -> Iterator[None]:
        """For the block, the global generators are this episode's; one block of the process runs at a time."""
        with _GLOBAL_GENERATORS:
            numpy = getattr(sys.modules.get("numpy"), "random", None)
            others = random.getstate(), numpy.get_state() if numpy else None
            random.setstate(self._python)
            if numpy:
                numpy.seed(self._seed % 2**32) if self._numpy is None else numpy.set_state(self._numpy)
            try:
                yield
            finally:
                self._python = random.getstate()
                random.setstate(others[0])
                if numpy:
                    self._numpy = numpy.get_state()
                    numpy.set_state(others[1])
