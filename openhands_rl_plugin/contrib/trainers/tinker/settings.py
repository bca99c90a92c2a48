"""``[rl.tinker]``: the service that trains where ``[rl.training] engine = "tinker"``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from openhands_rl_plugin.config.fields import HttpUrl, Settings, VariableName
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.servers.door import is_loopback

HOSTED = "https://tinker.thinkingmachines.dev/services/tinker-prod"
"""The address of the hosted service, as its own client has it."""


class TinkerSettings(Settings):
    """``[rl.tinker]``: the address of a server of the Tinker API, its base model, and how it adds up a batch."""

    base_url: HttpUrl = Field(default="", description="server of the Tinker API; empty: the hosted service")
    model: str = Field(default="", description="the base model by its name there; empty: [rl.serving] model")
    api_key_env: VariableName = Field(
        default="TINKER_API_KEY", description="NAME of the environment variable with the service's key"
    )
    reduction: Literal["sum", "sequence-mean"] = Field(
        default="sum",
        description="how the server reduces token losses; sequence-mean: SkyRL's JAX back end; checked at the start",
    )
    timeout: float = Field(default=900.0, gt=0, description="seconds for one answer of the service")

    @model_validator(mode="after")
    def _no_key_in_the_clear(self) -> Self:
        parts = urlsplit(self.base_url)
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ValueError(
                "base_url: http:// would send key and data in the clear to another machine; use https:// or a tunnel "
                "to 127.0.0.1"
            )
        return self

    @property
    def address(self) -> str:
        """Of the server, without a slash at the end."""
        return self.base_url or HOSTED

    def api_key(self, environ: Mapping[str, str] | None = None) -> str | None:
        """The key, ``None`` where a server of one's own needs none. Raises ``ConfigError`` for the hosted service."""
        if key := (os.environ if environ is None else environ).get(self.api_key_env):
            return key
        if self.base_url:
            return None
        raise ConfigError(
            f"[rl.tinker] api_key_env: the environment variable {self.api_key_env} is not set; export it, or set "
            "base_url to a server of your own"
        )
