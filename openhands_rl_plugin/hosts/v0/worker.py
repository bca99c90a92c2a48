"""A worker process: plays episodes with a ``ControllerRunner`` for a ``WorkerPoolRunner``.

python -m openhands_rl_plugin.hosts.v0.worker       # messages on stdin and stdout; ends with its stdin
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import BinaryIO

from openhands_rl_plugin.errors import RLError
from openhands_rl_plugin.hosts.v0.driver import ControllerRunner
from openhands_rl_plugin.hosts.v0.worker_messages import (
    MAX_LINE_BYTES,
    TO_WORKER,
    Play,
    Played,
    Ready,
    Refused,
    Start,
    from_line,
    to_line,
)


class Worker:
    """Serves one pool until its end of the pipe closes."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests = requests
        self._answers = answers
        self._writing = asyncio.Lock()
        self._playing: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Make the runner, then play what comes."""
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._requests)
        start = from_line(TO_WORKER, await reader.readline())
        assert isinstance(start, Start)
        try:
            runner = ControllerRunner(start.settings, start.options)
        except RLError as error:
            await self._say(Refused.of(None, error))
            return
        await self._say(Ready())
        while line := await reader.readline():
            play = from_line(TO_WORKER, line)
            assert isinstance(play, Play)
            task = asyncio.create_task(self._play(runner, play))
            self._playing.add(task)
            task.add_done_callback(self._playing.discard)
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)

    async def _play(self, runner: ControllerRunner, play: Play) -> None:
        try:
            answer = Played(number=play.number, trajectory=await runner.run(play.request))
        except RLError as error:
            answer = Refused.of(play.number, error)
        await self._say(answer)

    async def _say(self, message: Ready | Played | Refused) -> None:
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
