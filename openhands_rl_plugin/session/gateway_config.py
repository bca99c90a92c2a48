"""Options of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from openhands_rl_plugin.config.rl import HttpUrl, SafeName, VariableName
from openhands_rl_plugin.core.servers import API_KEY, AccessRules, named_key, required_key
from openhands_rl_plugin.core.types import Bounded

MIB = 1024**2


def _with_version(url: str) -> str:
    """Append ``/v1`` to a URL without a path; any other path is kept."""
    return url if urlsplit(url).path else f"{url}/v1"


class GatewayConfig(BaseModel):
    """The gateway's address, its model server and its limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    upstream: Annotated[HttpUrl, AfterValidator(_with_version)] = Field(
        min_length=1, description="base URL of the model server, such as http://127.0.0.1:8100/v1"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on; any but loopback needs a key")
    port: int = Field(default=8200, ge=0, le=65535, description="0 takes a free port")
    api_key_env: VariableName = Field(
        default=API_KEY,
        description="environment variable with the API key that clients must send; unset: no key is required",
    )
    upstream_key_env: VariableName = Field(
        default="",
        description="environment variable with the model server's API key; unset: the client's key is forwarded",
    )
    run_id: str = Field(
        default="gateway",
        min_length=1,
        max_length=200,
        description="run that the episodes belong to; one gateway per run",
    )
    base_model: str = Field(default="", description="model below versioned adapter names; unset: not recorded")
    adapter: SafeName | None = Field(
        default=None, description="requests for 'latest' and for this name are routed to the adapter's current version"
    )
    adapters_path: Path = Field(
        default=Path("~/.openhands/rl_adapters"), description="directory of the adapters, as in [rl.serving]"
    )
    idle_minutes: float = Field(default=60.0, gt=0, description="minutes without requests after which a session ends")
    max_body_bytes: int = Field(default=64 * MIB, ge=1024, description="maximum size of a request in bytes")
    timeout: float = Field(
        default=600.0, gt=0, description="seconds for one answer of the model server, to its last byte"
    )
    sampling_defaults: Literal["neutral", "model"] = Field(
        default="neutral",
        description="parameters that a request leaves open: neutral: temperature and top_p 1, no top_k, min_p or "
        "penalty, as training needs; model: left to the server",
    )
    restore_calls: bool = Field(
        default=False,
        description="tool calls that a client repaired and wrote anew (OpenHands V1) go to the model server as they "
        "were sampled, so that every prompt extends the one before; known by their ids",
    )
    reward_min: Bounded = Field(default=-1.0, description="lowest reward that a client may end a session with")
    reward_max: Bounded = Field(default=1.0, description="highest reward that a client may end a session with")
    keep_alive: float = Field(default=10.0, gt=0, description="seconds between keep-alive comments in a stream")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.reward_min > self.reward_max:
            raise ValueError("--reward-min is above --reward-max")
        if self.adapter is not None and not self.base_model:
            raise ValueError("--adapter needs --base-model, the name of the model without an adapter")
        return self

    def access(self) -> AccessRules:
        """Who is let in. Raises ``ConfigError`` when a network address has no key."""
        return AccessRules(required_key(self.host, self.api_key_env, protects="the model server"))

    def upstream_key(self) -> str:
        """The model server's key, empty for none. Raises ``ConfigError`` when its variable is not set."""
        return named_key(self.upstream_key_env, "--upstream-key-env")
