"""Calls to the other side of a channel, answered by number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from openhands_rl_plugin.core.errors import RLError


class Calls[A]:
    """The calls of one side that wait for an answer. For one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[A]] = {}

    async def ask(self, send: Callable[[int], Awaitable[None]]) -> A:
        """The answer to what ``send`` sends under the number that it gets. Raises the error that is the answer."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await send(number)
            return await answer
        finally:
            del self._waiting[number]

    def answered(self, number: int, answer: A | RLError) -> None:
        """Complete the call of this number. Answers to cancelled calls are ignored."""
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, RLError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def disconnect(self, error: RLError) -> None:
        """Fail the calls that wait: the other side is gone."""
        for number in list(self._waiting):
            self.answered(number, error)
