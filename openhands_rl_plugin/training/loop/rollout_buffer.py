"""Groups of rollouts ahead of the trainer, bounded by the maximal staleness."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from openhands_rl_plugin.core.types import Trajectory


@dataclass(frozen=True)
class Group:
    """The episodes of one task that are compared with each other; ``number`` counts the groups of a run."""

    number: int
    trajectories: tuple[Trajectory, ...]


class RolloutBuffer:
    """Rolls out groups concurrently and returns finished ones, the oldest first.

    ``held``: the number of groups that were returned before. A group is open from its start until ``close``, which is
    called for the groups of a batch when the weights trained on it are in use. So with a ``limit`` of ``(max_staleness
    + 1)`` batches an episode that starts now is at most ``max_staleness`` versions old when it is trained on, unless
    others overtake it.
    """

    def __init__(
        self, play: Callable[[int], Awaitable[Group]], *, used: Collection[int], held: int, limit: int
    ) -> None:
        self._play = play
        self._numbers = (number for number in count() if number not in used)
        self._open = held
        self._limit = limit
        self._finished: dict[int, Group] = {}
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Roll out as tasks of ``tasks`` until ``stop``; an error in one of them cancels all."""
        self._spawn(tasks, self._produce(tasks))

    def stop(self) -> None:
        """Cancel the rollouts in progress; their turns so far are stored."""
        for task in self._tasks:
            task.cancel()

    async def take(self) -> Group:
        """Wait for a finished group; the oldest one."""
        while not self._finished:
            self._more.clear()
            await self._more.wait()
        return self._finished.pop(min(self._finished))

    def close(self, groups: int, limit: int | None = None) -> None:
        """Close ``groups`` of the returned groups; from now on at most ``limit`` may be open."""
        self._open -= groups
        self._limit = self._limit if limit is None else limit
        self._room.set()

    async def _produce(self, tasks: asyncio.TaskGroup) -> None:
        for number in self._numbers:
            while self._open >= self._limit:
                self._room.clear()
                await self._room.wait()
            self._open += 1
            self._spawn(tasks, self._finish(number))

    async def _finish(self, number: int) -> None:
        self._finished[number] = await self._play(number)
        self._more.set()

    def _spawn(self, tasks: asyncio.TaskGroup, work: Awaitable[None]) -> None:
        task = tasks.create_task(_awaited(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ThroughputMeter:
    """Throughput of the rollout slots."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._busy = 0
        self._finished = 0
        self._worked = 0.0
        self._since = self._start = time.monotonic()

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Occupy one slot during the block; count an episode unless the block raises."""
        self._change(1)
        try:
            yield
            self._finished += 1
        finally:
            self._change(-1)

    def read(self) -> dict[str, float]:
        """Episodes per hour and the share of idle slots, since the last reading."""
        self._change(0)
        seconds = max(self._since - self._start, 1e-9)
        figures = {
            "rollouts_an_hour": 3600 * self._finished / seconds,
            "rollouts_waiting_share": 1 - self._worked / (seconds * self._places),
        }
        self._finished, self._worked, self._start = 0, 0.0, self._since
        return figures

    def _change(self, by: int) -> None:
        now = time.monotonic()
        self._worked += self._busy * (now - self._since)
        self._since = now
        self._busy += by


async def _awaited(work: Awaitable[None]) -> None:
    await work
