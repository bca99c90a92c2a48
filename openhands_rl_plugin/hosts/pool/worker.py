"""The worker's side of a pool: runs episodes with a host's runner, and sends their records to the pool's storage.

python -m openhands_rl_plugin.hosts.pool.worker       # messages on stdin and stdout; ends with its stdin
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, BinaryIO

from openhands_rl_plugin.core.errors import RLError, StorageError, boundary
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.types import FailureKind, Trajectory
from openhands_rl_plugin.hosts.local import HostRunner, local_runner
from openhands_rl_plugin.hosts.pool.connection import (
    MAX_LINE_BYTES,
    TO_WORKER,
    Calls,
    FromWorker,
    Ready,
    Refused,
    RunEpisode,
    Start,
    Store,
    Stored,
    WorkerResult,
    from_line,
    to_line,
)

_CLOSE_SECONDS = 2.0
"""What open sessions have to close in, when the pool is gone."""
_SWITCH_SECONDS = 0.1
"""OpenHands has a dozen threads a session: at Python's 0.005 most time goes into switches when many sessions begin."""


class EpisodeWorker:
    """Handles the messages of one pool. ``send`` sends a message to the pool."""

    def __init__(self, send: Callable[[FromWorker], Awaitable[None]]) -> None:
        os.environ.setdefault("LOG_LEVEL", "ERROR")
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        self._send = send
        self._storage = PoolStorage(send)
        self._episodes: set[asyncio.Task[None]] = set()
        self._runner: HostRunner | None = None

    async def receive(self, line: bytes) -> None:
        """Handle one message. Episodes run as background tasks."""
        message = from_line(TO_WORKER, line)
        if isinstance(message, Stored):
            self._storage.answered(message)
        elif isinstance(message, Start):
            await self._start(message)
        else:
            assert self._runner is not None
            task = asyncio.create_task(self._run(self._runner, message))
            self._episodes.add(task)
            task.add_done_callback(self._episodes.discard)

    async def close(self) -> None:
        """Cancel the episodes; returns when their sessions are closed."""
        self._storage.disconnect()
        episodes = tuple(self._episodes)
        for task in episodes:
            task.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)

    async def _start(self, start: Start) -> None:
        try:
            self._runner = local_runner(start.settings, start.options, storage=self._storage if start.stores else None)
        except RLError as error:
            await self._send(Refused.of(None, error))
        else:
            await self._send(Ready())

    async def _run(self, runner: HostRunner, message: RunEpisode) -> None:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "worker"):
                trajectory = await runner.run(message.request, message.workspace)
        except RLError as error:
            await self._send(Refused.of(message.number, error))
        else:
            await self._send(WorkerResult(number=message.number, trajectory=trajectory))


async def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Serve a pool until it closes the pipe."""
    writing = asyncio.Lock()

    def write(line: bytes) -> None:
        answers.write(line)
        answers.flush()

    async def send(message: FromWorker) -> None:
        async with writing:
            await asyncio.to_thread(write, to_line(message))

    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
    worker = EpisodeWorker(send)
    while line := await reader.readline():
        await worker.receive(line)
    await worker.close()


def _end_after(requests: int) -> None:
    """Bound the end: sessions may hang, and a pool that was killed ends nobody."""
    gone = select.poll()
    gone.register(requests, 0)  # only that the other end is closed
    gone.poll()
    time.sleep(_CLOSE_SECONDS)
    os._exit(1)


def main() -> None:
    """Serve a pool on stdin and stdout. Output of other libraries goes to stderr; the pool handles signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # what is ignored would be ignored in the agent's shells, too
    sys.setswitchinterval(_SWITCH_SECONDS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    threading.Thread(target=_end_after, args=(requests.fileno(),), name="pool-watch", daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    status = 1
    try:
        asyncio.run(_serve(requests, answers))
        status = 0
    except BrokenPipeError:
        pass  # the pool is gone: nothing can be reported
    finally:
        sys.stderr.flush()
        # OpenHands' threads may still wait for a model call.
        os._exit(status)


class PoolStorage:
    """The pool's storage, as a worker's runner uses it: a call returns when the pool has stored the record.

    One process writes for all workers: their episodes share a flush, and workers need no secrets of the storage.
    """

    def __init__(self, send: Callable[[Store], Awaitable[None]]) -> None:
        self._send = send
        self._calls = Calls[Stored]()

    async def add(self, trajectory: Trajectory) -> None:
        """As in ``TrajectoryStorage``."""
        await self._store(trajectory=trajectory)

    async def begin(self, start: EpisodeStart) -> None:
        """As in ``TrajectoryStorage``."""
        await self._store(start=start)

    async def grow(self, growth: EpisodeGrowth) -> None:
        """As in ``TrajectoryStorage``."""
        await self._store(growth=growth)

    async def end(self, end: EpisodeEnd) -> None:
        """As in ``TrajectoryStorage``."""
        await self._store(end=end)

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """As in ``TrajectoryStorage``."""
        return (await self._store(drop=tuple(trajectory_ids))).dropped

    def answered(self, answer: Stored) -> None:
        """Complete the call that ``answer`` belongs to."""
        self._calls.answered(answer.number, StorageError(answer.error) if answer.error else answer)

    def disconnect(self) -> None:
        """Fail the calls that wait for an answer: the pool is gone."""
        self._calls.disconnect(StorageError("the worker pool is gone"))

    async def _store(self, **record: Any) -> Stored:
        return await self._calls.ask(lambda number: self._send(Store(number=number, **record)))


if __name__ == "__main__":
    main()
