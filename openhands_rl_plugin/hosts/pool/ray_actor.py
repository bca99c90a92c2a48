"""What a Ray cluster runs: a process that plays episodes with a host's runner.

What goes to and fro are the messages of ``worker_messages``, as lines of JSON: Ray carries bytes and looks into none.
"""

from __future__ import annotations

import asyncio
import os

from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.hosts.local import HostRunner, local_runner
from openhands_rl_plugin.hosts.pool.messages import (
    TO_WORKER,
    FromWorker,
    Play,
    Played,
    Ready,
    Refused,
    Start,
    Stored,
    from_line,
    to_line,
)
from openhands_rl_plugin.hosts.pool.worker import PoolStorage


class EpisodeActor:
    """Plays for one pool. Its methods are called by way of Ray, many at a time."""

    def __init__(self) -> None:
        for name, value in (("LOG_LEVEL", "ERROR"), ("LITELLM_LOCAL_MODEL_COST_MAP", "True")):
            os.environ.setdefault(name, value)
        self._runner: HostRunner | None = None
        self._playing: set[asyncio.Task[Trajectory]] = set()
        self._outbox: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._storage = PoolStorage(self._outbox.put)

    async def start(self, line: bytes) -> bytes:
        """Make the runner: ``Start`` -> ``Ready`` or ``Refused``."""
        start = from_line(TO_WORKER, line)
        assert isinstance(start, Start)
        try:
            self._runner = local_runner(start.settings, start.options, storage=self._storage if start.stores else None)
        except RLError as error:
            return to_line(Refused.of(None, error))
        return to_line(Ready())

    async def play(self, line: bytes) -> bytes:
        """One episode: ``Play`` -> ``Played`` or ``Refused``."""
        play = from_line(TO_WORKER, line)
        assert isinstance(play, Play) and self._runner is not None
        task = asyncio.create_task(self._runner.run(play.request, play.place))
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)
        try:
            return to_line(Played(number=play.number, trajectory=await task))
        except RLError as error:
            return to_line(Refused.of(play.number, error))

    async def outbox(self) -> list[bytes]:
        """What is to be stored, as soon as there is something."""
        lines = [to_line(await self._outbox.get())]
        while not self._outbox.empty():
            lines.append(to_line(self._outbox.get_nowait()))
        return lines

    async def stored(self, line: bytes) -> None:
        """``Stored``: the answer to something in the outbox."""
        answer = from_line(TO_WORKER, line)
        assert isinstance(answer, Stored)
        self._storage.answered(answer)

    async def leave(self) -> None:
        """Give up what is being played; returns when its sessions are closed."""
        self._storage.give_up()
        playing = tuple(self._playing)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        if self._runner is not None:
            await self._runner.close()
