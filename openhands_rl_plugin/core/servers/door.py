"""Who may use a server: whoever has its key; without a key, programs of this machine, but no web page in a browser."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from openhands_rl_plugin.core.errors import ConfigError

API_KEY = "OPENHANDS_RL_API_KEY"
"""The environment variable of the key that clients of a server must send, unless an option names another."""
HEALTH, METRICS = "/health", "/metrics"
_KEY_REMEDY = "start the server with a key and send it"
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:@/\s]+))(?::\d*)?")
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Refusal:
    """Why a request is not let in: an HTTP status, the kind of error, and one line."""

    status: int
    kind: str
    message: str


@dataclass(frozen=True)
class Door:
    """Checks a request by its headers. ``key``: what clients must send; empty: none is asked for.

    A key comes as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``; ``/health`` needs none. Without one a browser is
    the danger: any page may send requests to this machine, and a name that resolves to 127.0.0.1 makes them its own
    (DNS rebinding). So the ``Host`` has to be loopback, an ``Origin`` the server's own, and a body JSON, which a page
    cannot send to another origin unasked.
    """

    key: str = ""

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why the request is refused, ``None`` if it is not. ``headers`` have lower-case names."""
        if self.key:
            open_to_all = path == HEALTH and method in ("GET", "HEAD")
            if open_to_all or self._has_key(headers):
                return None
            return Refusal(401, "Unauthorized", "The API key is missing or wrong.")
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_loopback(host_name(host)):
            return Refusal(403, "Forbidden", f"The host {host[:100]!r} is not this machine's loopback; {_KEY_REMEDY}.")
        foreign = origin is not None and origin.lower() != f"http://{host.lower()}"
        if foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return Refusal(403, "Forbidden", f"Web pages of other origins are refused; {_KEY_REMEDY}.")
        if method not in _WITHOUT_BODY and _has_body(headers) and not is_json(headers.get("content-type", "")):
            message = f"The body has to be sent as Content-Type: application/json, or {_KEY_REMEDY}."
            return Refusal(415, "UnsupportedMediaType", message)
        return None

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        expected = self.key.encode()
        bearer, key = (
            headers.get(name, "").encode("utf-8", "surrogateescape") for name in ("authorization", "x-api-key")
        )
        right = hmac.compare_digest(bearer, b"Bearer " + expected)
        return hmac.compare_digest(key, expected) or right


def required_key(host: str, variable: str, *, protects: str) -> str:
    """The key in the environment variable ``variable``, empty for none. The one rule of all servers.

    Raises ``ConfigError`` when there is no key and ``host`` is reachable from the network; ``protects`` says what
    anybody there could use then.
    """
    key = os.environ.get(variable, "")
    if not key and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: others on the network could use {protects}; export "
            f"{variable or 'a key and name it with --api-key-env'}=..., or listen on 127.0.0.1"
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own, reachable from nowhere else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_name(host: str) -> str:
    """``127.0.0.1:8100`` -> ``127.0.0.1``; ``[::1]:8100`` -> ``::1``; empty for what is no host."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]) if found else ""


def _has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def is_json(content_type: str) -> bool:
    """Whether a ``Content-Type`` is that of JSON, which a page cannot send to another origin unasked."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
