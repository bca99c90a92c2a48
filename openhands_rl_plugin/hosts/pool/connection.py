"""The pool's side of one worker, over any channel: each side calls methods of the other, in pickled messages."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

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
)
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, FailureKind, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.options import HostOptions


class Call(NamedTuple):
    """A call of a method of the other side."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Answer(NamedTuple):
    """What the call of this number returned, or the error that it raised."""

    number: int
    value: object
    error: RLError | None


class Peer:
    """Calls the other side, and answers its calls by the methods of ``serves``. For one event loop.

    ``send`` sends a message. ``answering`` has a task for each call of the other side.
    """

    def __init__(self, serves: object, send: Callable[[bytes], Awaitable[None]]) -> None:
        self.answering: set[asyncio.Task[None]] = set()
        self._serves = serves
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._gone: RLError | None = None

    async def ask(self, method: str, *arguments: object) -> Any:
        """What the other side's method returns. Raises the error that it raises, or that of ``disconnect``."""
        if self._gone is not None:
            raise self._gone
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(pickle.dumps(Call(number, method, arguments)))
            return await answer
        finally:
            del self._waiting[number]

    def receive(self, message: bytes) -> None:
        """Handle one message. Calls are answered in the background; answers to cancelled calls are ignored."""
        received: Call | Answer = pickle.loads(message)
        if isinstance(received, Call):
            task = asyncio.create_task(self._answer(received))
            self.answering.add(task)
            task.add_done_callback(self.answering.discard)
        elif (waiting := self._waiting.get(received.number)) is not None and not waiting.done():
            if received.error is not None:
                waiting.set_exception(received.error)
            else:
                waiting.set_result(received.value)

    def disconnect(self, error: RLError) -> None:
        """Fail all calls: the other side is gone."""
        self._gone = error
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def _answer(self, call: Call) -> None:
        value, error = None, None
        try:
            with boundary(FailureKind.INFRASTRUCTURE, f"worker.{call.method}"):
                value = await getattr(self._serves, call.method)(*call.arguments)
        except RLError as raised:
            error = _sent(raised)
        await self._send(pickle.dumps(Answer(call.number, value, error)))


# Classes whose errors are made of their text: those of others could not be read on the other side.
_SENT_AS: dict[type[RLError], type[RLError]] = {CaughtFailure: InfrastructureError, MissingExtraError: ConfigError}
_SENT_AS |= {kind: kind for kind in (ConfigError, PublishError, StorageError, TrainingError)}


def _sent(error: RLError) -> RLError:
    kind = next((sent for kind, sent in _SENT_AS.items() if isinstance(error, kind)), RLError)
    return kind(str(error))


def framed(message: bytes) -> bytes:
    """The message as it is written to a pipe: after its length."""
    return len(message).to_bytes(8) + message


async def read_message(pipe: asyncio.StreamReader) -> bytes:
    """The next message of a pipe; empty at its end."""
    try:
        return await pipe.readexactly(int.from_bytes(await pipe.readexactly(8)))
    except asyncio.IncompleteReadError:
        return b""


# Seconds. Importing OpenHands takes ten on an idle machine, and a cluster may have to start a machine first.
_START_TIMEOUT = 600.0


class WorkerChannel(Protocol):
    """Messages to and from one worker, on any machine."""

    async def send(self, message: bytes) -> None:
        """Send a message. Returns silently when the worker is gone: ``receive`` reports that."""
        ...

    async def receive(self) -> Sequence[bytes]:
        """The next messages; empty when the worker is gone."""
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
    """One worker. ``load`` is the number of its running episodes.

    It is sent the settings, with names of environment variables, but no secrets. Its records go to ``storage``.
    """

    def __init__(
        self, channel: WorkerChannel, settings: RLSettings, options: HostOptions, storage: TrajectoryStorage | None
    ) -> None:
        self._channel = channel
        self._storage = storage
        self._cancelled: set[str] = set()
        self._peer = Peer(self, channel.send)
        self._started = asyncio.create_task(self._peer.ask("start", settings, options, storage is not None))
        self._listener = asyncio.create_task(self._listen())
        self.load = 0
        self.alive = True

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None, timeout: float | None) -> Trajectory:
        """Run an episode. Raises ``InfrastructureError`` when the worker dies or does not answer within ``timeout``
        seconds (it is killed then), and errors that must stop the run."""
        self.load += 1
        self._cancelled.discard(trajectory_id(request))
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await asyncio.shield(self._started)
            async with asyncio.timeout(timeout):
                return await self._peer.ask("run", request, workspace)
        except TimeoutError as error:
            late = (
                f"did not answer within {timeout:g} s"
                if self._started.done()
                else f"was not ready in {_START_TIMEOUT:g} s"
            )
            self.alive = False
            self._channel.kill()
            raise InfrastructureError(f"a worker {late} and was ended") from error
        except asyncio.CancelledError:
            # The worker plays on while the caller takes the workspace away: what becomes of it is nobody's episode.
            self._cancelled.add(trajectory_id(request))
            raise
        finally:
            self.load -= 1

    async def store(self, method: str, record: Any) -> Any:
        """The worker's record, written by a method of the pool's storage. Raises ``StorageError``."""
        if {getattr(record, "id", ""), getattr(record, "trajectory_id", "")} & self._cancelled:
            raise StorageError("the episode was cancelled")
        return await getattr(self._storage, method)(record)

    async def close(self) -> None:
        """End the worker and its episodes."""
        await self._channel.close()
        await self._listener

    async def _listen(self) -> None:
        while messages := await self._channel.receive():
            for message in messages:
                self._peer.receive(message)
        self.alive = False
        await asyncio.gather(*self._peer.answering)
        self._peer.disconnect(InfrastructureError(await self._channel.exit_message()))
