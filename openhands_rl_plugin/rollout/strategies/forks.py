"""The pool of forks that a search holds, by state, and the time that a step in one has."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from openhands_rl_plugin.core.concurrency import shielded
from openhands_rl_plugin.core.errors import BadEnvironmentError, CaughtFailure, boundary
from openhands_rl_plugin.core.protocols import Environment, info_of
from openhands_rl_plugin.core.types import FailureKind, Message


@asynccontextmanager
async def in_step_time(world: object, step_timeout: float, actions: Iterable[Message]) -> AsyncIterator[None]:
    """Bounds a copy of ``world`` and these steps in it to ``step_timeout`` seconds, or to what the world says that the
    steps may take where that is more. Raises ``BadEnvironmentError`` when the time is over."""
    seconds = info_of(world).step_timeout
    own = sum(map(seconds, actions)) if seconds is not None else 0.0
    limit = asyncio.timeout(max(step_timeout, own))
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        more = f" (and than the {own:g} s that its commands may take)" if own > step_timeout else ""
        raise BadEnvironmentError(
            f"a step in a copy, with the copying, took longer than step_timeout = {step_timeout:g} s{more}: "
            "raise it in [rl.strategy]"
        ) from error


class ForkPool:
    """Forks by the states at which they stand, at most ``most`` at a time.

    A fork has a place from before it is made until it is closed. If all places are taken, the least recently used fork
    is closed, unless it is being copied. No task waits for a place while it copies a fork, so there is no deadlock.

    A started close continues when its caller is cancelled, as no other task would close the fork. It is given up after
    ``patience`` seconds.
    """

    def __init__(self, most: int, patience: float) -> None:
        self._free = most
        self._patience = patience
        self._closing: set[asyncio.Task[None]] = set()
        self._kept: OrderedDict[int | None, Environment] = OrderedDict()
        self._copied: Counter[int | None] = Counter()
        self._changed = asyncio.Event()
        self._left = False

    async def enter(self) -> None:
        """Take a place, as soon as there is one."""
        while self._free < 1:
            idle = [state for state in self._kept if not self._copied[state]]
            if idle:
                await self.end(self._kept.pop(idle[0]))
            else:
                self._changed.clear()
                await self._changed.wait()
        self._free -= 1

    def leave(self) -> None:
        """Give a place back."""
        self._free += 1
        self._changed.set()

    async def end(self, environment: Environment) -> None:
        """Close a fork that is not kept, and give its place back."""
        await asyncio.shield(self._begin_to_end(environment))

    def get(self, state: int | None) -> Environment | None:
        """The fork that is kept at ``state``, which counts as used now."""
        if state in self._kept:
            self._kept.move_to_end(state)
        return self._kept.get(state)

    @contextmanager
    def copied(self, state: int | None) -> Iterator[None]:
        """Keep the fork at ``state`` open while it is copied."""
        self._copied[state] += 1
        try:
            yield
        finally:
            self._copied[state] -= 1
            self._changed.set()

    async def keep(self, state: int | None, environment: Environment) -> None:
        """Keep a fork, which has a place, until another fork needs the place."""
        if self._left:
            return await self.end(environment)
        self._kept[state] = environment
        self._changed.set()

    def take(self, state: int | None) -> Environment | None:
        """What was kept at ``state``; it belongs to the caller now, as does its place."""
        return self._kept.pop(state, None)

    async def close(self) -> None:
        """Close all that is kept, and keep nothing any more; returns when no close is under way."""
        self._left = True
        kept, self._kept = list(self._kept.values()), OrderedDict()
        for environment in kept:
            self._begin_to_end(environment)
        await shielded(asyncio.gather(*self._closing))

    def _begin_to_end(self, environment: Environment) -> asyncio.Task[None]:
        closing = asyncio.create_task(self._end(environment))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _end(self, environment: Environment) -> None:
        """A failed close leaks a fork but does not spoil the search."""
        try:
            with suppress(CaughtFailure), boundary(FailureKind.INFRASTRUCTURE, "search.close"):
                async with asyncio.timeout(self._patience):
                    await environment.close()
        finally:
            self.leave()
