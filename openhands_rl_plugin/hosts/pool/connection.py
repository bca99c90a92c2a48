"""The pool's side of one worker, over any channel: messages of one JSON document a line, and calls by number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    ConfigError,
    InfrastructureError,
    MissingExtraError,
    PublishError,
    RLError,
    StorageError,
    TrainingError,
    boundary,
    describe,
)
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, FailureKind, Frozen, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.rollout.journal import EpisodeSink

MAX_LINE_BYTES = 256 * 1024 * 1024
"""Far above the longest episodes (tens of MiB with token ids); limits the memory for a broken worker's line."""


class Start(Frozen):
    """To a worker, first: the settings of its runner, with names of environment variables, but no secrets.

    ``stores``: whether the pool has a storage.
    """

    kind: Literal["start"] = "start"
    settings: RLSettings
    options: HostOptions
    stores: bool = False


class RunEpisode(Frozen):
    """To a worker: run an episode."""

    kind: Literal["run"] = "run"
    number: int
    request: EpisodeRequest
    workspace: TaskWorkspace | None = None


class Stored(Frozen):
    """To a worker: the result of a ``Store``; ``error`` is empty on success."""

    kind: Literal["stored"] = "stored"
    number: int
    dropped: int = 0
    error: str = ""


class Ready(Frozen):
    """From a worker: it can run episodes."""

    kind: Literal["ready"] = "ready"


class WorkerResult(Frozen):
    """From a worker: a finished episode."""

    kind: Literal["result"] = "result"
    number: int
    trajectory: Trajectory


class Store(Frozen):
    """From a worker: records for the pool's storage, written in the order of the fields. The episode waits."""

    kind: Literal["store"] = "store"
    number: int
    drop: tuple[str, ...] = ()
    start: EpisodeStart | None = None
    growth: EpisodeGrowth | None = None
    end: EpisodeEnd | None = None
    trajectory: Trajectory | None = None

    @property
    def episodes(self) -> set[str]:
        """The ids of the trajectories that are written to."""
        written = {each.trajectory_id for each in (self.growth, self.end) if each is not None}
        return written | {each.id for each in (self.start, self.trajectory) if each is not None}

    async def write_to(self, storage: EpisodeSink) -> Stored:
        """Write the records. Raises ``StorageError``."""
        dropped = await storage.drop(self.drop) if self.drop else 0
        if self.start is not None:
            await storage.begin(self.start)
        if self.growth is not None:
            await storage.grow(self.growth)
        if self.end is not None:
            await storage.end(self.end)
        if self.trajectory is not None:
            await storage.add(self.trajectory)
        return Stored(number=self.number, dropped=dropped)


class Refused(Frozen):
    """From a worker: an error that must stop the run. ``number`` is ``None`` when its runner could not be created."""

    kind: Literal["refused"] = "refused"
    number: int | None
    error: str
    message: str

    @classmethod
    def of(cls, number: int | None, error: RLError) -> Refused:
        """The error as a message."""
        return cls(number=number, error=type(error).__name__, message=str(error))

    def as_error(self) -> RLError:
        """The error as an instance of its class."""
        return _ERRORS.get(self.error, RLError)(self.message)


_ERRORS: dict[str, type[RLError]] = {
    error.__name__: error for error in (ConfigError, PublishError, StorageError, TrainingError)
}
_ERRORS[MissingExtraError.__name__] = ConfigError
# A runner should not raise this error; it fails only its episode.
_ERRORS[CaughtFailure.__name__] = InfrastructureError

ToWorker = Start | RunEpisode | Stored
FromWorker = Ready | WorkerResult | Store | Refused
TO_WORKER: TypeAdapter[ToWorker] = TypeAdapter(Annotated[ToWorker, Field(discriminator="kind")])
FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="kind")])


def to_line(message: Frozen) -> bytes:
    """The message as one line, with its newline."""
    return message.model_dump_json().encode() + b"\n"


def from_line[T](adapter: TypeAdapter[T], line: bytes) -> T:
    """Read one line. Raises ``InfrastructureError`` for anything but a complete message."""
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        raise InfrastructureError(f"not a message: {describe(error)}") from error


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


# Seconds. Importing OpenHands takes ten on an idle machine, and a cluster may have to start a machine first.
_START_TIMEOUT = 600.0


class WorkerChannel(Protocol):
    """Lines of ``messages`` to and from one worker, on any machine."""

    async def send(self, line: bytes) -> None:
        """Send a line. Returns silently when the worker is gone: ``receive`` reports that."""
        ...

    async def receive(self) -> Sequence[bytes]:
        """The next lines; empty when the worker is gone. Raises ``InfrastructureError`` for other data."""
        ...

    async def exit_message(self) -> str:
        """Why the worker is gone, after ``receive`` has returned nothing."""
        ...

    def kill(self) -> None:
        """End the worker at once."""
        ...

    async def close(self) -> None:
        """Let the worker close its sessions, then end it."""
        ...


class WorkerConnection:
    """One worker. ``load`` is the number of its running episodes, ``was_ready`` whether it has ever been ready."""

    def __init__(self, channel: WorkerChannel, start: Start, storage: TrajectoryStorage | None) -> None:
        self._channel = channel
        self._storage = storage
        self._storing: set[asyncio.Task[None]] = set()
        self._calls = Calls[Trajectory]()
        self._cancelled: set[str] = set()
        self._started = asyncio.Event()
        self._error: RLError | None = None
        self._listener = asyncio.create_task(self._listen(start))
        self.load = 0
        self.was_ready = False
        self.alive = True

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None, timeout: float | None) -> Trajectory:
        """Run an episode. Raises ``InfrastructureError`` when the worker dies or does not answer within ``timeout``
        seconds (it is killed then), and errors that must stop the run."""
        self.load += 1
        self._cancelled.discard(trajectory_id(request))
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await self._started.wait()
            return await self._result(request, workspace, timeout)
        except TimeoutError as error:
            late = (
                f"did not answer within {timeout:g} s" if self.was_ready else f"was not ready in {_START_TIMEOUT:g} s"
            )
            self._kill()
            raise InfrastructureError(f"a worker {late} and was ended") from error
        except asyncio.CancelledError:
            # The worker plays on while the caller takes the workspace away: what becomes of it is nobody's episode.
            self._cancelled.add(trajectory_id(request))
            raise
        finally:
            self.load -= 1

    async def close(self) -> None:
        """End the worker and its episodes."""
        await self._channel.close()
        await self._listener

    async def _result(
        self, request: EpisodeRequest, workspace: TaskWorkspace | None, timeout: float | None
    ) -> Trajectory:
        if self._error is not None:
            raise self._error
        async with asyncio.timeout(timeout):
            return await self._calls.ask(
                lambda number: self._channel.send(
                    to_line(RunEpisode(number=number, request=request, workspace=workspace))
                )
            )

    async def _listen(self, start: Start) -> None:
        try:
            await self._channel.send(to_line(start))
            while lines := await self._channel.receive():
                for line in lines:
                    self._take(from_line(FROM_WORKER, line))
        except InfrastructureError as error:
            self._error = error
            self._kill()
        self.alive = False
        await asyncio.gather(*self._storing)
        self._error = self._error or InfrastructureError(await self._channel.exit_message())
        self._started.set()
        self._calls.disconnect(self._error)

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Ready):
            self.was_ready = True
            self._started.set()
        elif isinstance(message, Store):
            storing = asyncio.create_task(self._store(message))
            self._storing.add(storing)
            storing.add_done_callback(self._storing.discard)
        elif message.number is None:
            self._error = message.as_error()
            self._started.set()
        else:
            answer = message.trajectory if isinstance(message, WorkerResult) else message.as_error()
            self._calls.answered(message.number, answer)

    async def _store(self, message: Store) -> None:
        assert self._storage is not None
        if message.episodes & self._cancelled:
            await self._channel.send(to_line(Stored(number=message.number, error="the episode was cancelled")))
            return
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "storage"):
                answer = await message.write_to(self._storage)
        except RLError as error:
            answer = Stored(number=message.number, error=str(error) or describe(error))
        await self._channel.send(to_line(answer))

    def _kill(self) -> None:
        self.alive = False
        self._channel.kill()
