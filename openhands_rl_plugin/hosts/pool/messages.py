"""What a worker pool and its worker processes say to each other: one JSON document a line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import (
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
from openhands_rl_plugin.environments.workspace.place import Place
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.rollout.journal import EpisodeSink

MAX_LINE_BYTES = 256 * 1024 * 1024


class Start(Frozen):
    """To a worker, first: what to make its runner of. Secrets are not in it, only names of environment variables.

    ``stores``: whether the pool has a storage, which gets the episodes as they are played.
    """

    kind: Literal["start"] = "start"
    settings: RLSettings
    options: HostOptions
    stores: bool = False


class Play(Frozen):
    """To a worker: play an episode."""

    kind: Literal["play"] = "play"
    number: int
    request: EpisodeRequest
    place: Place | None = None


class Stored(Frozen):
    """To a worker: what became of a ``Store``; ``error`` is empty when everything is in the storage."""

    kind: Literal["stored"] = "stored"
    number: int
    dropped: int = 0
    error: str = ""


class Ready(Frozen):
    """From a worker: its runner is made."""

    kind: Literal["ready"] = "ready"


class Played(Frozen):
    """From a worker: an episode's end."""

    kind: Literal["played"] = "played"
    number: int
    trajectory: Trajectory


class Store(Frozen):
    """From a worker: what the pool has to store before the episode goes on; what is there, in the order of fields."""

    kind: Literal["store"] = "store"
    number: int
    drop: tuple[str, ...] = ()
    start: EpisodeStart | None = None
    growth: EpisodeGrowth | None = None
    end: EpisodeEnd | None = None
    trajectory: Trajectory | None = None

    async def into(self, storage: EpisodeSink) -> Stored:
        """Store it. Raises ``StorageError``."""
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
    """From a worker: an error that must stop the run. ``number`` is ``None`` when no runner could be made."""

    kind: Literal["refused"] = "refused"
    number: int | None
    error: str
    message: str

    @classmethod
    def of(cls, number: int | None, error: RLError) -> Refused:
        """The error as a message."""
        return cls(number=number, error=type(error).__name__, message=str(error))

    def as_error(self) -> RLError:
        """The error again, by its class's name."""
        return _STOPPING.get(self.error, RLError)(self.message)


_STOPPING = {error.__name__: error for error in (ConfigError, PublishError, StorageError, TrainingError)}
_STOPPING[MissingExtraError.__name__] = ConfigError

ToWorker = Start | Play | Stored
FromWorker = Ready | Played | Store | Refused
TO_WORKER: TypeAdapter[ToWorker] = TypeAdapter(Annotated[ToWorker, Field(discriminator="kind")])
FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="kind")])


def to_line(message: ToWorker | FromWorker) -> bytes:
    """One line, with its end."""
    return message.model_dump_json().encode() + b"\n"


def from_line[T](adapter: TypeAdapter[T], line: bytes) -> T:
    """Read one line. Raises ``InfrastructureError`` for anything else than a whole message."""
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        raise InfrastructureError(f"not a message: {describe(error)}") from error
