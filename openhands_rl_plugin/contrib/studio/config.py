"""Options of the studio."""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.config.rl import VariableName
from openhands_rl_plugin.contrib.studio.access import StudioAccess
from openhands_rl_plugin.contrib.studio.tickets import Tickets
from openhands_rl_plugin.core.servers import API_KEY, required_key
from openhands_rl_plugin.core.types import Frozen

MIB = 1024**2


class StudioConfig(Frozen):
    """Its address, and what it needs to show tokens as text."""

    host: str = Field(default="127.0.0.1", description="address to listen on; any but loopback needs a key")
    port: int = Field(default=8400, ge=0, le=65535, description="0 takes a free port")
    api_key_env: VariableName = Field(
        default=API_KEY,
        description="environment variable with a key that programs, and browsers without a link, may send instead",
    )
    allow_host: str = Field(
        default="", description="name that browsers may reach it by, beside addresses; separate several by commas"
    )
    tokenizer: str = Field(default="", description="folder with the tokenizer.json that token ids are shown with")
    author: str = Field(default="", max_length=200, description="who labels (default: the user's name)")
    max_body_bytes: int = Field(default=MIB, ge=1024, description="maximum size of a request in bytes")

    def access(self, tickets: Tickets) -> StudioAccess:
        """Who is let in. Raises ``ConfigError`` when a network address has no key."""
        key = required_key(self.host, self.api_key_env, protects="the stored episodes")
        names = frozenset(name.strip().lower() for name in self.allow_host.split(",") if name.strip())
        return StudioAccess(key=key, tickets=tickets, names=names, bound=self.host)
