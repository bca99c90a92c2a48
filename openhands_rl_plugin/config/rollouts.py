"""What ``openhands-rl rollouts serve`` is told: where it listens, how episodes are played, and how many at a time."""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.config.fields import VariableName
from openhands_rl_plugin.config.rollout import PlayOptions, PlaySettings
from openhands_rl_plugin.core.servers.door import API_KEY

_MIB = 1024**2


class ServiceOptions(PlaySettings):
    """The service. A task may name another model, sampling and limits; the rest is the service's."""

    listen: str = Field(default="127.0.0.1", description="address to listen on; any but loopback needs a key")
    port: int = Field(default=8500, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    service_key_env: VariableName = Field(
        default=API_KEY, description="NAME of the environment variable with the key that clients must send"
    )
    workers: int = Field(default=1, ge=1, le=256, description="worker processes")
    playing: int = Field(default=4, ge=1, le=256, description="episodes that each worker plays at a time")
    grading: int = Field(default=2, ge=1, le=256, description="episodes that each worker grades at a time")
    attempts: int = Field(default=3, ge=1, le=20, description="tries of an episode that the infrastructure fails")
    most_waiting: int = Field(default=10_000, ge=1, description="episodes that may wait; more tasks are refused")
    keep_hours: float = Field(default=168.0, gt=0, description="hours that a finished task and its results are kept")
    max_body_bytes: int = Field(default=16 * _MIB, ge=1024, description="size of the largest request")

    def options(self, **own: object) -> PlayOptions:
        """The options of one episode, with ``own`` over those of the service. Raises ``ValidationError``."""
        common = {name: getattr(self, name) for name in PlaySettings.model_fields}
        return PlayOptions.model_validate(
            {**common, **{name: value for name, value in own.items() if value is not None}}
        )
