"""Who may see the studio: the browser that opened its link, whoever has the key; no page of another origin."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from openhands_rl_plugin.contrib.studio.tickets import Tickets
from openhands_rl_plugin.core.servers import METRICS, AccessRules, Refusal, host_name, is_json, is_loopback

SIGN_IN = "/api/session"
_READS = ("GET", "HEAD")
_OWN = ("same-origin", "none")


@dataclass(frozen=True)
class StudioAccess(AccessRules):
    """``names``: hosts that it may be called by, beside addresses; ``bound``: the address that it listens on.

    The document and its modules hold no data, so they are shown to all; ``/api`` and ``/metrics`` need a session's
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
            return Refusal(403, "Forbidden", f"The host {host[:100]!r} is not this studio's; see --allow-host.")
        keyed = bool(self.key) and self._has_key(headers)
        if (foreign := self._foreign(method, path, headers, keyed)) is not None:
            return foreign
        if method not in _READS and not is_json(headers.get("content-type", "")):
            return Refusal(415, "UnsupportedMediaType", "The body has to be sent as Content-Type: application/json.")
        private = path.startswith("/api/") or path == METRICS
        if private and path != SIGN_IN and not keyed and not self.tickets.knows(headers.get("cookie", "")):
            return Refusal(401, "Unauthorized", "Open the link that `openhands-rl studio` printed; it works once.")
        return None

    def _is_ours(self, name: str) -> bool:
        """A name of others may be made to lead here (DNS rebinding); an address cannot."""
        if is_loopback(name) or name.lower() in self.names:
            return True
        return not is_loopback(self.bound) and _is_address(name)

    def _foreign(self, method: str, path: str, headers: Mapping[str, str], keyed: bool) -> Refusal | None:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        own = {f"{scheme}://{headers.get('host', '').lower()}" for scheme in ("http", "https")}
        wrong = origin is not None and origin.lower() not in own
        if method in _READS:
            # A link on another page may lead to the document, and to nothing else.
            wrong |= site not in (None, *_OWN) and path.startswith("/api/")
        else:
            wrong |= site not in (None, *_OWN) or (origin is None and site is None and not keyed)
        return Refusal(403, "Forbidden", "Web pages of other origins are refused.") if wrong else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
