"""Plays episodes with OpenHands' controller in several worker processes, each with many sessions.

One process is limited by its interpreter lock. Workers are new Python processes, so nothing is inherited by accident;
they get the settings as JSON and their secrets by the names of environment variables.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from typing import Protocol

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import InfrastructureError, RLError, boundary, describe
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.retry import Backoff
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Failure,
    FailureKind,
    PolicyRef,
    StopReason,
    Times,
    Trajectory,
)
from openhands_rl_plugin.environments.workspace.place import Place
from openhands_rl_plugin.hosts.pool.messages import (
    FROM_WORKER,
    MAX_LINE_BYTES,
    FromWorker,
    Play,
    Played,
    Ready,
    Refused,
    Start,
    Store,
    Stored,
    ToWorker,
    from_line,
    to_line,
)
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.rollout.journal import stored_episode
from openhands_rl_plugin.rollout.session import trajectory_id

_MODULE = "openhands_rl_plugin.hosts.pool.worker"
_CLOSE_PATIENCE = 10.0
_OVERTIME = 60.0
_BACKOFF = Backoff(first=2.0, longest=30.0)
_WORDS_KEPT = 20


class PoolWorker(Protocol):
    """One process that plays episodes, on whichever machine."""

    @property
    def alive(self) -> bool:
        """Whether it can be given episodes."""
        ...

    @property
    def was_ready(self) -> bool:
        """Whether it ever was able to play."""
        ...

    @property
    def load(self) -> int:
        """Episodes that it is playing."""
        ...

    async def play(self, request: EpisodeRequest, place: Place | None, longest: float | None) -> Trajectory:
        """Play an episode. Raises ``InfrastructureError`` when the process dies, or is killed for not answering within
        ``longest`` seconds, and what must stop the run."""
        ...

    async def close(self) -> None:
        """End it; what it is playing is given up."""
        ...


class WorkerPoolRunner:
    """An ``EpisodeRunner`` over ``workers`` processes.

    ``options.sessions`` bounds the sessions of each process (default: ``[rl] max_workers`` shared out). The episodes of
    a worker that dies come back as infrastructure failures, and the worker is replaced. With a ``storage`` episodes are
    stored as they are played, by this process for all workers.
    """

    def __init__(
        self,
        settings: RLSettings,
        options: HostOptions | None = None,
        *,
        workers: int = 2,
        storage: TrajectoryStorage | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError("a pool needs at least one worker")
        options = options or HostOptions()
        sessions = options.sessions or max(1, settings.max_workers // workers)
        self._settings = settings
        self._options = options.model_copy(update={"sessions": sessions})
        self._storage = storage
        self._gate = asyncio.Semaphore(workers * sessions)
        self._slots: list[PoolWorker | None] = [None] * workers
        self._failed_starts = 0
        self._starting = asyncio.Lock()

    async def run(self, request: EpisodeRequest, place: Place | None = None) -> Trajectory:
        """Play one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        async with self._gate:
            started = time.time()
            try:
                worker = await self._least_busy()
                return await worker.play(request, place, self._overtime(request))
            except InfrastructureError as error:
                return await self._failed(request, error, started)

    async def close(self) -> None:
        """End the workers; episodes that are being played are given up."""
        workers = [worker for worker in self._slots if worker is not None]
        await asyncio.gather(*(worker.close() for worker in workers))
        self._slots = [None] * len(self._slots)

    async def _start_worker(self) -> PoolWorker:
        return await _Worker.start(self._settings, self._options, self._storage)

    async def _least_busy(self) -> PoolWorker:
        async with self._starting:
            for index, worker in enumerate(self._slots):
                if worker is not None and worker.alive:
                    continue
                if worker is not None:
                    await worker.close()
                    await self._pause_after(worker)
                self._slots[index] = await self._start_worker()
        # One that died since then answers with its failure.
        return min((worker for worker in self._slots if worker is not None), key=lambda worker: worker.load)

    async def _pause_after(self, dead: PoolWorker) -> None:
        self._failed_starts = 0 if dead.was_ready else self._failed_starts + 1
        if self._failed_starts:
            await _BACKOFF.wait(self._failed_starts)

    def _overtime(self, request: EpisodeRequest) -> float | None:
        limits = request.task.limits or self._settings.limits()
        return None if limits.timeout is None else limits.timeout + _OVERTIME

    async def _failed(self, request: EpisodeRequest, error: InfrastructureError, started: float) -> Trajectory:
        """The episode of a worker that is gone, with what is stored of it; perhaps that is all of it."""
        model = self._settings.serving.model
        stored = await stored_episode(self._storage, trajectory_id(request)) if self._storage is not None else None
        if stored is not None and stored.stop is not StopReason.UNFINISHED:
            return stored
        tree = EpisodeTree() if stored is None else EpisodeTree.thaw(stored)
        trajectory = tree.freeze(
            request,
            trajectory_id=trajectory_id(request),
            strategy=self._options.strategy_spec(self._settings),
            policy=PolicyRef.from_served_name(model, request.served_model or model),
            stop=StopReason.ERROR,
            times=Times(started=started if stored is None else stored.times.started, finished=time.time()),
            failure=Failure(kind=FailureKind.INFRASTRUCTURE, message=describe(error), boundary="controller.worker"),
        )
        if self._storage is not None:
            await self._storage.add(trajectory)
        return trajectory


class _Worker:
    """One process, and the episodes that it is playing."""

    def __init__(self, process: asyncio.subprocess.Process, storage: TrajectoryStorage | None) -> None:
        self._process = process
        self._storage = storage
        self._storing: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self._playing: dict[int, asyncio.Future[Trajectory]] = {}
        self._refusal: Refused | None = None
        self._last_words: deque[str] = deque(maxlen=_WORDS_KEPT)
        self._listeners = [asyncio.create_task(self._listen_to_errors()), asyncio.create_task(self._listen())]
        self.was_ready = False
        self.alive = True

    @classmethod
    async def start(cls, settings: RLSettings, options: HostOptions, storage: TrajectoryStorage | None) -> _Worker:
        """A new process, which may be given episodes at once. Raises ``InfrastructureError``."""
        environment = {"LOG_LEVEL": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", **os.environ}
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(f"no worker process could be started: {error}") from error
        worker = cls(process, storage)
        await worker._send(Start(settings=settings, options=options, stores=storage is not None))
        return worker

    @property
    def load(self) -> int:
        """Episodes that it is playing."""
        return len(self._playing)

    async def play(self, request: EpisodeRequest, place: Place | None, longest: float | None) -> Trajectory:
        """Play an episode. Raises ``InfrastructureError`` when the process dies, or is killed for not answering within
        ``longest`` seconds, and what must stop the run."""
        if self._refusal is not None:
            raise self._refusal.as_error()
        self._numbers += 1
        number = self._numbers
        answer = self._playing[number] = asyncio.get_running_loop().create_future()
        try:
            if not self.alive:
                raise InfrastructureError(self._obituary())
            await self._send(Play(number=number, request=request, place=place))
            async with asyncio.timeout(longest):
                return await answer
        except TimeoutError as error:
            self._kill()
            raise InfrastructureError(f"a worker did not answer within {longest:g} s and was ended") from error
        finally:
            del self._playing[number]

    async def close(self) -> None:
        """Close its stdin, which ends it; kill it if it does not end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_PATIENCE):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()
        await asyncio.gather(*self._listeners)

    async def _send(self, message: Start | Play) -> None:
        if not await self._write(message):
            # The process is gone; the listener says so to everybody who waits for it.
            await asyncio.wait(self._listeners)

    async def _write(self, message: ToWorker) -> bool:
        """Write to the process; false when it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(to_line(message))
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._take(from_line(FROM_WORKER, line))
        except (InfrastructureError, ValueError) as error:
            self._last_words.append(describe(error))
            self._kill()
        self.alive = False
        await self._process.wait()
        await asyncio.gather(self._listeners[0], *self._storing)
        error = self._refusal.as_error() if self._refusal else InfrastructureError(self._obituary())
        for answer in self._playing.values():
            if not answer.done():
                answer.set_exception(error)

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Ready):
            self.was_ready = True
        elif isinstance(message, Store):
            storing = asyncio.create_task(self._store(message))
            self._storing.add(storing)
            storing.add_done_callback(self._storing.discard)
        elif message.number is None:
            self._refusal = message
        elif (answer := self._playing.get(message.number)) is not None and not answer.done():
            if isinstance(message, Played):
                answer.set_result(message.trajectory)
            else:
                answer.set_exception(message.as_error())

    async def _store(self, message: Store) -> None:
        assert self._storage is not None
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "storage"):
                answer = await message.into(self._storage)
        except RLError as error:
            answer = Stored(number=message.number, error=str(error) or describe(error))
        await self._write(answer)

    async def _listen_to_errors(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(65536):
            self._last_words.extend(line for line in chunk.decode("utf-8", "replace").splitlines() if line.strip())

    def _kill(self) -> None:
        self.alive = False
        if self._process.returncode is None:
            self._process.kill()

    def _obituary(self) -> str:
        status = self._process.returncode
        if status is None or status < 0 or not self._last_words:
            return f"a worker process was ended by signal {-status}" if status else "a worker process ended"
        return f"a worker process ended with status {status}, saying {self._last_words[-1][:300]!r}"
