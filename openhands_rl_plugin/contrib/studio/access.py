"""Who may use the studio: the browser that opened its link, and clients with the key; no page of another origin."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field

from openhands_rl_plugin.config.rl import VariableName
from openhands_rl_plugin.core.servers import (
    API_KEY,
    AccessRules,
    Refusal,
    host_name,
    is_json,
    is_loopback,
    required_key,
)
from openhands_rl_plugin.core.types import Frozen

COOKIE = "openhands_rl_studio"
SIGN_IN = "/api/session"
_BYTES = 24
_READS = ("GET", "HEAD")
_OWN = ("same-origin", "none")


class Tickets:
    """``token``: of the link, as long as the studio runs. ``cookie``: of a browser that has opened it."""

    def __init__(self) -> None:
        self.token, self.cookie = secrets.token_urlsafe(_BYTES), secrets.token_urlsafe(_BYTES)

    def knows(self, cookie_header: str) -> bool:
        """Whether a ``Cookie`` header has the cookie."""
        # Several headers are joined by commas, which no value here contains.
        parts = (part.strip().partition("=") for part in cookie_header.replace(",", ";").split(";"))
        return any(name == COOKIE and self.same(value, self.cookie) for name, _, value in parts)

    @staticmethod
    def same(one: str, other: str) -> bool:
        """Whether two secrets are equal, compared in constant time."""
        return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode())


@dataclass(frozen=True)
class StudioAccess(AccessRules):
    """``names``: host names of the studio, in addition to addresses; ``bound``: the address that it listens on.

    The document and its modules hold no data, so they are shown to all; ``/api`` needs a session's
    cookie or the key. Whatever is sent may come from the studio's own pages only: ``Origin`` and ``Sec-Fetch-Site``
    have to say so where they are there, and one of them, or the key, has to be.
    """

    tickets: Tickets = field(default_factory=Tickets)
    names: frozenset[str] = frozenset()
    bound: str = "127.0.0.1"

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why the request is refused, ``None`` if it is not. ``headers`` have lower-case names."""
        host = headers.get("host", "")
        if not self._is_ours(host_name(host)):
            return 403, f"The host {host[:100]!r} is not this studio's; see --allow-host.", "Forbidden"
        keyed = bool(self.key) and self._has_key(headers)
        if self._is_foreign(method, path, headers, keyed):
            return 403, "Web pages of other origins are refused.", "Forbidden"
        if method not in _READS and not is_json(headers.get("content-type", "")):
            return 415, "The body has to be sent as Content-Type: application/json.", "UnsupportedMediaType"
        private = path.startswith("/api/")
        if private and path != SIGN_IN and not keyed and not self.tickets.knows(headers.get("cookie", "")):
            return 401, "Open the link that `openhands-rl studio` printed.", "Unauthorized"
        return None

    def _is_ours(self, name: str) -> bool:
        """A name of others may be made to lead here (DNS rebinding); an address cannot."""
        if is_loopback(name) or name.lower() in self.names:
            return True
        return not is_loopback(self.bound) and _is_address(name)

    def _is_foreign(self, method: str, path: str, headers: Mapping[str, str], keyed: bool) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        own = [f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")]
        if origin is not None and origin.lower() not in own:
            return True
        if method in _READS:
            # A link on another page may lead to the document, and to nothing else.
            return site not in (None, *_OWN) and path.startswith("/api/")
        return site not in (None, *_OWN) or (origin is None and site is None and not keyed)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class StudioConfig(Frozen):
    """Options of the studio: its address, access, tokenizer and author."""

    host: str = Field(default="127.0.0.1", description="address to listen on; any but loopback needs a key")
    port: int = Field(default=8400, ge=0, le=65535, description="0 takes a free port")
    api_key_env: VariableName = Field(
        default=API_KEY,
        description="environment variable with a key that programs, and browsers without a link, may send instead",
    )
    allow_host: str = Field(
        default="", description="host name that browsers use, in addition to addresses; separate several by commas"
    )
    tokenizer: str = Field(default="", description="folder with the tokenizer.json that token ids are shown with")
    author: str = Field(default="", max_length=200, description="who labels (default: the user's name)")
    max_body_bytes: int = Field(default=1024**2, ge=1024, description="maximum size of a request in bytes")

    def access(self, tickets: Tickets) -> StudioAccess:
        """Who is let in. Raises ``ConfigError`` when a network address has no key."""
        key = required_key(self.host, self.api_key_env, protects="the stored episodes")
        names = frozenset(name.strip().lower() for name in self.allow_host.split(",") if name.strip())
        return StudioAccess(key=key, tickets=tickets, names=names, bound=self.host)
