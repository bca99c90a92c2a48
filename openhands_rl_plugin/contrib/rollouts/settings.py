"""What ``openhands-rl rollouts serve`` is told: where it listens, how episodes are played, and how many at a time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from openhands_rl_plugin.config.fields import HttpUrl, VariableName
from openhands_rl_plugin.config.rollout import PlayOptions, PlaySettings
from openhands_rl_plugin.core.servers.door import API_KEY

_MIB = 1024**2


class ServiceOptions(PlaySettings):
    """The service. A task may name another model, sampling and limits; the rest is the service's."""

    base_urls: tuple[HttpUrl, ...] = Field(
        default=(), description="endpoints with the same weights behind one name, in place of --base-url"
    )
    listen: str = Field(default="127.0.0.1", description="address to listen on; any but loopback needs a key")
    port: int = Field(default=8500, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    service_key_env: VariableName = Field(
        default=API_KEY, description="NAME of the environment variable with the key that clients must send"
    )
    executor: Literal["processes", "ray"] = Field(
        default="processes", description="where workers run: processes of this machine, or Ray actors with a CPU each"
    )
    workers: int = Field(default=1, ge=1, le=256, description="worker processes, or actors")
    playing: int = Field(default=4, ge=1, le=256, description="episodes that each worker plays at a time")
    prepared: int = Field(
        default=0, ge=0, le=256, description="workspaces of repository tasks that each worker makes ahead of play"
    )
    setup_timeout: float = Field(default=1800.0, gt=0, description="seconds that a workspace may take to be made")
    grading: int = Field(default=2, ge=1, le=256, description="episodes that each worker grades at a time")
    attempts: int = Field(default=3, ge=1, le=20, description="tries of an episode that the infrastructure fails")
    most_waiting: int = Field(default=10_000, ge=1, description="episodes that may wait; more tasks are refused")
    max_policy_lag: int | None = Field(
        default=None, ge=0, description="versions that a task's weights may be behind before its rest is cancelled"
    )
    longest_pause: float = Field(
        default=600.0, gt=0, description="seconds after which held calls of the model go on, unless paused again"
    )
    keep_hours: float = Field(default=168.0, gt=0, description="hours that a finished task and its results are kept")
    max_body_bytes: int = Field(default=16 * _MIB, ge=1024, description="size of the largest request")

    @model_validator(mode="after")
    def _one_or_several(self) -> ServiceOptions:
        if self.base_url and self.base_urls:
            raise ValueError("give --base-url for one endpoint, or --base-urls for several")
        if len(set(self.base_urls)) != len(self.base_urls):
            raise ValueError("--base-urls: an endpoint is named twice")
        if self.base_urls and self.executor == "ray":
            raise ValueError(
                "--executor ray: other machines do not reach the balancer of --base-urls; give --base-url with one "
                "address that all machines reach"
            )
        return self

    @property
    def settled(self) -> ServiceOptions:
        """With ``base_url`` in any case: the first endpoint, where there are several."""
        if not self.base_urls:
            return self
        return self.model_copy(update={"base_url": self.base_urls[0], "base_urls": ()})

    def options(self, **own: object) -> PlayOptions:
        """The options of one episode, with ``own`` over those of the service. Raises ``ValidationError``."""
        common = {name: getattr(self, name) for name in PlaySettings.model_fields}
        return PlayOptions.model_validate(
            {**common, **{name: value for name, value in own.items() if value is not None}}
        )
