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
from typing import BinaryIO

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.local import HostRunner, local_runner
from openhands_rl_plugin.hosts.pool.connection import Peer, framed, read_message
from openhands_rl_plugin.hosts.shared.options import HostOptions

_CLOSE_SECONDS = 2.0
"""What open sessions have to close in, when the pool is gone."""
_SWITCH_SECONDS = 0.1
"""OpenHands has a dozen threads a session: at Python's 0.005 most time goes into switches when many sessions begin."""


class EpisodeWorker:
    """What a pool asks of its worker. ``send`` sends a message to the pool, ``receive`` handles one of it."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        os.environ.setdefault("LOG_LEVEL", "ERROR")
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        self._pool = Peer(self, send)
        self.receive = self._pool.receive
        self._runner: HostRunner | None = None

    async def start(self, settings: RLSettings, options: HostOptions, stores: bool) -> None:
        """Get ready to run episodes; ``stores``: whether the pool has a storage. Raises ``ConfigError``."""
        self._runner = local_runner(settings, options, storage=PoolStorage(self._pool) if stores else None)

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None) -> Trajectory:
        """As a host's runner."""
        assert self._runner is not None
        return await self._runner.run(request, workspace)

    async def close(self) -> None:
        """Cancel the episodes; returns when their sessions are closed."""
        self._pool.disconnect(StorageError("the worker pool is gone"))
        episodes = tuple(self._pool.answering)
        for task in episodes:
            task.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)


async def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Serve a pool until it closes the pipe."""
    writing = asyncio.Lock()

    def write(data: bytes) -> None:
        answers.write(data)
        answers.flush()

    async def send(message: bytes) -> None:
        async with writing:
            await asyncio.to_thread(write, framed(message))

    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
    worker = EpisodeWorker(send)
    while message := await read_message(reader):
        worker.receive(message)
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

    def __init__(self, pool: Peer) -> None:
        self._pool = pool

    async def add(self, trajectory: Trajectory) -> None:
        """As in ``TrajectoryStorage``."""
        await self._pool.ask("store", "add", trajectory)

    async def begin(self, start: EpisodeStart) -> None:
        """As in ``TrajectoryStorage``."""
        await self._pool.ask("store", "begin", start)

    async def grow(self, growth: EpisodeGrowth) -> None:
        """As in ``TrajectoryStorage``."""
        await self._pool.ask("store", "grow", growth)

    async def end(self, end: EpisodeEnd) -> None:
        """As in ``TrajectoryStorage``."""
        await self._pool.ask("store", "end", end)

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """As in ``TrajectoryStorage``."""
        return await self._pool.ask("store", "drop", trajectory_ids)


if __name__ == "__main__":
    main()
