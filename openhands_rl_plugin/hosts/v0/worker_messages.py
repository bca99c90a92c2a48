"""What a worker pool and its worker processes say to each other: one JSON document a line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from openhands_rl_plugin.errors import (
    ConfigError,
    InfrastructureError,
    MissingExtraError,
    PublishError,
    RLError,
    StorageError,
    TrainingError,
    describe,
)
from openhands_rl_plugin.hosts.v0.driver import ControllerOptions
from openhands_rl_plugin.settings import RLSettings
from openhands_rl_plugin.types import EpisodeRequest, Frozen, Trajectory

MAX_LINE_BYTES = 256 * 1024 * 1024


class Start(Frozen):
    """To a worker, first: what to make its runner of. Secrets are not in it, only names of environment variables."""

    kind: Literal["start"] = "start"
    settings: RLSettings
    options: ControllerOptions


class Play(Frozen):
    """To a worker: play an episode."""

    kind: Literal["play"] = "play"
    number: int
    request: EpisodeRequest


class Ready(Frozen):
    """From a worker: its runner is made."""

    kind: Literal["ready"] = "ready"


class Played(Frozen):
    """From a worker: an episode's end."""

    kind: Literal["played"] = "played"
    number: int
    trajectory: Trajectory


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

ToWorker = Annotated[Start | Play, Field(discriminator="kind")]
FromWorker = Annotated[Ready | Played | Refused, Field(discriminator="kind")]
TO_WORKER: TypeAdapter[Start | Play] = TypeAdapter(ToWorker)
FROM_WORKER: TypeAdapter[Ready | Played | Refused] = TypeAdapter(FromWorker)


def to_line(message: Start | Play | Ready | Played | Refused) -> bytes:
    """One line, with its end."""
    return message.model_dump_json().encode() + b"\n"


def from_line[T](adapter: TypeAdapter[T], line: bytes) -> T:
    """Read one line. Raises ``InfrastructureError`` for anything else than a whole message."""
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        raise InfrastructureError(f"not a message: {describe(error)}") from error
