"""Forks of a live episode, which a strategy has during one decision: all are closed at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

from openhands_rl_plugin.core.concurrency import shielded
from openhands_rl_plugin.core.errors import CaughtFailure, InfrastructureError, boundary
from openhands_rl_plugin.core.protocols import EnvInfo, Environment, Forkable, info_of
from openhands_rl_plugin.core.tree import clip
from openhands_rl_plugin.core.types import FailureKind, JsonObject, Limits, Message, Observation, Task

# Seconds for a fork to open, and to close: copying a workspace and starting its shell take one or two.
_TIMEOUT = 10.0


class World(Forkable, Protocol):
    """A live episode during one decision, for strategies that search in forks of it."""

    async def close(self) -> None:
        """Close all forks."""
        ...


class OpenForks:
    """Forks that are being created or in use."""

    def __init__(self) -> None:
        self._forks: set[asyncio.Task[Any]] = set()
        self._ended = False

    async def add[E: Environment](self, make: Coroutine[Any, Any, E]) -> E:
        """Wait for a fork. If the caller is cancelled, ``close`` closes the fork.

        Raises ``InfrastructureError`` after ``close``.
        """
        if self._ended:
            make.close()
            raise InfrastructureError("the search has ended: no more forks")
        task = asyncio.create_task(make)
        self._forks.add(task)
        return await asyncio.shield(task)

    def closed(self, branch: Environment) -> None:
        """A fork was closed by its user."""
        self._forks = {task for task in self._forks if not _is_made(task) or task.result() is not branch}

    async def close(self) -> None:
        """Close all forks, also those that are still being created. One that does not open or close in time is
        abandoned. Closing continues even when the caller is cancelled."""
        await shielded(self._close_all())

    async def _close_all(self) -> None:
        self._ended = True
        if self._forks:
            await asyncio.wait(self._forks, timeout=_TIMEOUT)
        await asyncio.gather(*(_close(task.result()) for task in self._forks if _is_made(task)))


def _is_made(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _close(branch: Environment) -> None:
    with suppress(CaughtFailure), boundary(FailureKind.INFRASTRUCTURE, "search.close"):
        async with asyncio.timeout(_TIMEOUT):
            await branch.close()


class EnvironmentWorld(OpenForks):
    """A live episode of an environment, which can only be forked. Its forks answer as the session records."""

    def __init__(self, environment: Forkable, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self._environment = environment

    @property
    def info(self) -> EnvInfo:
        """The environment's own."""
        return info_of(self._environment)

    async def fork(self) -> Environment:
        """A copy of the episode as it stands. Raises what its environment raises."""
        return await self.copied(self._environment)

    async def copied(self, origin: Forkable) -> Environment:
        """A copy of the episode, or of one of its forks."""
        return await self.add(self._copied(origin))

    async def _copied(self, origin: Forkable) -> _Fork:
        made = await origin.fork()
        return (_ForkableFork if isinstance(made, Forkable) else _Fork)(self, made)


class _Fork:
    def __init__(self, world: EnvironmentWorld, environment: Environment) -> None:
        self.world = world
        self.environment = environment

    async def reset(self, task: Task) -> Observation:
        """Refused: a fork stands in the middle of an episode."""
        raise RuntimeError("a fork continues from where it was made")

    async def step(self, action: Message) -> Observation:
        return clip(await self.environment.step(action), self.world.limits)

    async def evidence(self) -> JsonObject:
        return await self.environment.evidence()

    async def close(self) -> None:
        self.world.closed(self)
        await self.environment.close()


class _ForkableFork(_Fork):
    @property
    def info(self) -> EnvInfo:
        """The environment's own."""
        return info_of(self.environment)

    async def fork(self) -> Environment:
        assert isinstance(self.environment, Forkable)
        return await self.world.copied(self.environment)
