"""Concurrent work that is cancelled as a whole when one part of it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together[T](work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run concurrently and return the results in order. If one raises, the others are cancelled and awaited, so that
    no task outlives a search; then the exception is raised."""
    tasks: list[asyncio.Task[T]] = []
    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(each) for each in work)
    except BaseExceptionGroup as several:
        first = several.exceptions[0]
    if first is not None:
        raise first
    return [task.result() for task in tasks]
