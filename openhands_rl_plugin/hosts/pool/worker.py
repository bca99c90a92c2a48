"""A worker process: plays episodes with a host's runner for a ``WorkerPoolRunner``.

python -m openhands_rl_plugin.hosts.pool.worker       # messages on stdin and stdout; ends with its stdin
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, BinaryIO

from openhands_rl_plugin.core.errors import RLError, StorageError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.hosts.local import HostRunner, local_runner
from openhands_rl_plugin.hosts.pool.messages import (
    MAX_LINE_BYTES,
    TO_WORKER,
    FromWorker,
    Play,
    Played,
    Ready,
    Refused,
    Start,
    Store,
    Stored,
    from_line,
    to_line,
)


class PoolStorage:
    """The pool's storage, as its worker's runner sees it: a call returns when the pool has stored what it was given.

    So one process writes for all workers: their episodes share a flush, and no worker needs the storage's secrets.
    """

    def __init__(self, say: Callable[[FromWorker], Awaitable[None]]) -> None:
        self._say = say
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Stored]] = {}

    async def add(self, trajectory: Trajectory) -> None:
        """As in ``TrajectoryStorage``."""
        await self._ask(trajectory=trajectory)

    async def begin(self, start: EpisodeStart) -> None:
        """As in ``TrajectoryStorage``."""
        await self._ask(start=start)

    async def grow(self, growth: EpisodeGrowth) -> None:
        """As in ``TrajectoryStorage``."""
        await self._ask(growth=growth)

    async def end(self, end: EpisodeEnd) -> None:
        """As in ``TrajectoryStorage``."""
        await self._ask(end=end)

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """As in ``TrajectoryStorage``."""
        return (await self._ask(drop=tuple(trajectory_ids))).dropped

    def answered(self, answer: Stored) -> None:
        """Take the pool's answer to one of the calls."""
        waiting = self._waiting.get(answer.number)
        # A call that was cancelled waits no more.
        if waiting is None or waiting.done():
            return
        if answer.error:
            waiting.set_exception(StorageError(answer.error))
        else:
            waiting.set_result(answer)

    def give_up(self) -> None:
        """The pool is gone: fail what waits for an answer."""
        for number in list(self._waiting):
            self.answered(Stored(number=number, error="the worker pool is gone"))

    async def _ask(self, **what: Any) -> Stored:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._say(Store(number=number, **what))
            return await answer
        finally:
            del self._waiting[number]


class Worker:
    """Serves one pool until its end of the pipe closes."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests = requests
        self._answers = answers
        self._writing = asyncio.Lock()
        self._playing: set[asyncio.Task[None]] = set()
        self._storage = PoolStorage(self._say)

    async def serve(self) -> None:
        """Make the runner, then play what comes."""
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._requests)
        start = from_line(TO_WORKER, await reader.readline())
        assert isinstance(start, Start)
        try:
            runner = local_runner(start.settings, start.options, storage=self._storage if start.stores else None)
        except RLError as error:
            await self._say(Refused.of(None, error))
            return
        await self._say(Ready())
        while line := await reader.readline():
            message = from_line(TO_WORKER, line)
            if isinstance(message, Stored):
                self._storage.answered(message)
                continue
            assert isinstance(message, Play)
            task = asyncio.create_task(self._play(runner, message))
            self._playing.add(task)
            task.add_done_callback(self._playing.discard)
        self._storage.give_up()
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)

    async def _play(self, runner: HostRunner, play: Play) -> None:
        try:
            answer = Played(number=play.number, trajectory=await runner.run(play.request, play.place))
        except RLError as error:
            answer = Refused.of(play.number, error)
        await self._say(answer)

    async def _say(self, message: FromWorker) -> None:
        async with self._writing:
            await asyncio.to_thread(self._write, to_line(message))

    def _write(self, line: bytes) -> None:
        self._answers.write(line)
        self._answers.flush()


def main() -> None:
    """Keep stdout for messages, whatever the host's libraries print, and leave interrupts to the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    status = 1
    try:
        asyncio.run(Worker(requests, answers).serve())
        status = 0
    except BrokenPipeError:
        pass  # the pool is gone, and nobody is left to be told
    finally:
        sys.stderr.flush()
        # Threads of the host may hang in a model call that nobody waits for any more.
        os._exit(status)


if __name__ == "__main__":
    main()
