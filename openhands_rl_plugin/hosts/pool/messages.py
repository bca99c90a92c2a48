"""The messages between a worker pool and its workers: one JSON document a line."""

from __future__ import annotations

from typing import Annotated, Literal

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
    describe,
)
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.types import EpisodeRequest, Frozen, Trajectory
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
