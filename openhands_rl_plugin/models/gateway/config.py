"""Options of the gateway."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from openhands_rl_plugin.config.rl import HttpUrl, SafeName, VariableName
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.models.server.client_key import required_client_key

MIB = 1024**2


def _with_version(url: str) -> str:
    """A server's root gets OpenAI's ``/v1``; a path that the user wrote stays."""
    return url if urlsplit(url).path else f"{url}/v1"


class GatewayConfig(BaseModel):
    """Where the gateway listens, what is behind it, and its bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    upstream: Annotated[HttpUrl, AfterValidator(_with_version)] = Field(
        min_length=1, description="base URL of the model server, such as http://127.0.0.1:8100/v1"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on; any but loopback needs a key")
    port: int = Field(default=8200, ge=0, le=65535, description="0 takes a free port")
    api_key_env: VariableName = Field(
        default="OPENHANDS_RL_API_KEY",
        description="environment variable with the key that clients must send; none is asked for when it is unset",
    )
    upstream_key_env: VariableName = Field(
        default="", description="environment variable with the model server's key; unset: the client's own is passed on"
    )
    run_id: str = Field(
        default="gateway",
        min_length=1,
        max_length=200,
        description="run that the episodes belong to; one gateway a run",
    )
    base_model: str = Field(default="", description="model below versioned adapter names; unset: not recorded")
    adapter: SafeName | None = Field(
        default=None, description="'latest' and this name are sent to the adapter's current version"
    )
    adapters_path: Path = Field(
        default=Path("~/.openhands/rl_adapters"), description="directory of the adapters, as in [rl.serving]"
    )
    alias: tuple[str, ...] = Field(
        default=(), description="further model name that means the adapter's current version; may be repeated"
    )
    pin_sessions: bool = Field(default=False, description="a session stays on the adapter version it started with")
    idle_minutes: float = Field(default=60.0, gt=0, description="a session without calls for so long has ended")
    max_sessions: int = Field(default=256, ge=1, description="sessions held in memory; others are read back")
    max_in_flight: int = Field(default=256, ge=1, description="calls at a time; one more is refused with 503")
    max_body_bytes: int = Field(default=64 * MIB, ge=1024, description="longest request")
    max_answer_bytes: int = Field(default=256 * MIB, ge=1024, description="longest answer of the model server")
    timeout: float = Field(default=600.0, gt=0, description="seconds that the model server may stay silent")
    keep_alive: float = Field(default=10.0, gt=0, description="seconds between signs of life to a streaming client")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.alias and self.adapter is None:
            raise ValueError("--alias needs --adapter")
        if self.adapter is not None and not self.base_model:
            raise ValueError("--adapter needs --base-model, the name of the model without an adapter")
        return self

    def client_key(self) -> str:
        """The key that clients must send, empty for none. Raises ``ConfigError`` when a network address has none."""
        return required_client_key(self.host, self.api_key_env, protects="the model server")

    def upstream_key(self) -> str:
        """The model server's key, empty for none. Raises ``ConfigError`` when its variable is not set."""
        if not self.upstream_key_env:
            return ""
        if key := os.environ.get(self.upstream_key_env, ""):
            return key
        raise ConfigError(f"--upstream-key-env: the environment variable {self.upstream_key_env} is not set")
