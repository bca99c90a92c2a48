"""The forks of one decision, all of which are closed when it ends or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from openhands_rl_plugin.core.concurrency import shielded
from openhands_rl_plugin.core.errors import CaughtFailure, InfrastructureError, boundary
from openhands_rl_plugin.core.protocols import Environment
from openhands_rl_plugin.core.types import FailureKind

# Seconds for a fork to open, and to close: copying a workspace and starting its shell take one or two.
_TIMEOUT = 10.0


class OpenForks:
    """Forks that are being created or in use."""

    def __init__(self) -> None:
        self._making: set[asyncio.Task[Any]] = set()
        self._open: set[Environment] = set()
        self._closed = False

    async def add[E: Environment](self, make: Coroutine[Any, Any, E]) -> E:
        """Wait for a fork. If the caller is cancelled, ``close`` closes the fork.

        Raises ``InfrastructureError`` after ``close``.
        """
        if self._closed:
            make.close()
            raise InfrastructureError("the search has ended: no more forks")
        task = asyncio.create_task(self._made(make))
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        return await asyncio.shield(task)

    def closed(self, branch: Environment) -> None:
        """A fork was closed by its user."""
        self._open.discard(branch)

    async def close(self) -> None:
        """Close all forks, also those that are still being created. One that does not open or close in time is
        abandoned. Closing continues even when the caller is cancelled."""
        await shielded(self._close_all())

    async def _close_all(self) -> None:
        self._closed = True
        if self._making:
            await asyncio.wait(self._making, timeout=_TIMEOUT)
        await asyncio.gather(*(_close(branch) for branch in list(self._open)))

    async def _made[E: Environment](self, make: Coroutine[Any, Any, E]) -> E:
        branch = await make
        self._open.add(branch)
        return branch


async def _close(branch: Environment) -> None:
    with suppress(CaughtFailure), boundary(FailureKind.INFRASTRUCTURE, "search.close"):
        async with asyncio.timeout(_TIMEOUT):
            await branch.close()
