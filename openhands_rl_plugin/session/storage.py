"""A storage that is used from other threads, on its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.rollout.journal import EpisodeSink

# Seconds between checks whether the loop was closed.
_CHECK_INTERVAL = 1.0


def bound_to(storage: EpisodeSink, loop: asyncio.AbstractEventLoop) -> Any:
    """An ``EpisodeSink`` that calls ``storage`` on its own event loop ``loop``.

    Raises what the storage raises, and ``InfrastructureError`` when that loop is closed before the call ends.
    """
    return _LoopBoundStorage(storage, loop)


class _LoopBoundStorage:
    def __init__(self, storage: EpisodeSink, loop: asyncio.AbstractEventLoop) -> None:
        self._storage = storage
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """A method of the storage, to be called on its loop; nothing is done by one that a pipe to another process has
        not."""

        async def call(*given: Any) -> Any:
            if (method := getattr(self._storage, name, None)) is not None:
                return await self._on_loop(method(*given))

        return call

    async def _on_loop[T](self, call: Coroutine[Any, Any, T]) -> T:
        if self._loop is asyncio.get_running_loop():
            return await call
        if not self._loop.is_closed():
            answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
            # A stopped loop drops its tasks without an error.
            while not (await asyncio.wait([answer], timeout=_CHECK_INTERVAL))[0] and not self._loop.is_closed():
                pass
            if answer.done():
                return answer.result()
        call.close()
        raise InfrastructureError("the event loop of this episode was closed")
