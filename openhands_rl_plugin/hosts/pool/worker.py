"""The worker's side of a pool: runs episodes with a host's runner, and hands their records to the pool's storage.

python -m openhands_rl_plugin.hosts.pool.worker       # calls on the socket that is its stdin; ends with that
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partialmethod
from typing import Any, cast

from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.local import HostRunner, local_runner
from openhands_rl_plugin.hosts.pool.runner import LENGTH_BYTES, Given, Outcome, outcome
from openhands_rl_plugin.rollout.journal import EpisodeSink

# What open sessions have to close in, when the pool is gone.
_CLOSE_SECONDS = 2.0
# OpenHands has a dozen threads a session: at Python's 0.005 most time goes into switches when many sessions begin.
_SWITCH_SECONDS = 0.1


class EpisodeWorker:
    """Runs episodes in this process. A pool calls its methods by ``answer``.

    To its runner it is an ``EpisodeSink`` whose calls return when the pool has stored the record. One process writes
    for all workers: their episodes share a flush, and workers need no secrets of the storage.
    """

    def __init__(self) -> None:
        self._runner: HostRunner | None = None
        self._episodes: set[asyncio.Task[Trajectory]] = set()
        self._records = asyncio.Queue[tuple[str, Any, asyncio.Future[Outcome]]]()
        self._sent: list[asyncio.Future[Outcome]] = []

    async def answer(self, call: bytes) -> bytes:
        """Call a method by its name and arguments; returns its ``outcome``. Both are pickled."""
        method, arguments = pickle.loads(call)
        return pickle.dumps(await outcome(getattr(self, method)(*arguments)))

    async def run(self, given: Given, request: EpisodeRequest, workspace: TaskWorkspace | None) -> Trajectory:
        """As a host's runner, which the first call makes of what is ``given``."""
        if self._runner is None:
            settings, options, stores = given
            self._runner = local_runner(settings, options, storage=cast(EpisodeSink, self) if stores else None)
        episode = asyncio.create_task(self._runner.run(request, workspace))
        self._episodes.add(episode)
        episode.add_done_callback(self._episodes.discard)
        return await episode

    async def records(self, stored: Sequence[Outcome]) -> list[tuple[str, Any]]:
        """The next records for the pool's storage, each with its method; ``stored``: what became of the last ones."""
        for done, result in zip(self._sent, stored, strict=True):
            if not done.done():
                done.set_result(result)
        waiting = [await self._records.get()]
        while not self._records.empty():
            waiting.append(self._records.get_nowait())
        self._sent = [done for *_, done in waiting]
        return [(method, record) for method, record, _ in waiting]

    async def close(self) -> None:
        """Cancel the episodes; returns when their sessions are closed."""
        episodes = tuple(self._episodes)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)

    async def _store(self, method: str, record: Any) -> Any:
        done = asyncio.get_running_loop().create_future()
        self._records.put_nowait((method, record, done))
        value, error = await done
        if error is not None:
            raise error
        return value

    add = partialmethod(_store, "add")
    begin = partialmethod(_store, "begin")
    grow = partialmethod(_store, "grow")
    end = partialmethod(_store, "end")
    drop = partialmethod(_store, "drop")
    add_scores = partialmethod(_store, "add_scores")


async def _serve(calls: socket.socket) -> None:
    """Answer each call on the socket that comes with it, until the pool closes its end."""
    worker, answering = EpisodeWorker(), set[asyncio.Task[None]]()
    while sockets := (await asyncio.to_thread(socket.recv_fds, calls, 1, 1, socket.MSG_CMSG_CLOEXEC))[1]:
        task = asyncio.create_task(_answer(worker, socket.socket(fileno=sockets[0])))
        answering.add(task)
        task.add_done_callback(answering.discard)
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await worker.close()
    # Sessions may hang, and OpenHands' threads may still wait for a model call.
    os._exit(0)


async def _answer(worker: EpisodeWorker, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        with suppress(ConnectionError):  # the caller is gone
            answer = await worker.answer(await reader.read())
            writer.write(len(answer).to_bytes(LENGTH_BYTES) + answer)
            await writer.drain()
    finally:
        writer.close()


def main() -> None:
    """Serve a pool on stdin. The pool handles signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # what is ignored would be ignored in the agent's shells, too
    sys.setswitchinterval(_SWITCH_SECONDS)
    calls = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    asyncio.run(_serve(calls))


if __name__ == "__main__":
    main()
