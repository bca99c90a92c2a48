"""The API key that clients of a server of ours must send."""

from __future__ import annotations

import ipaddress
import os

from openhands_rl_plugin.core.errors import ConfigError


def required_client_key(host: str, variable: str, *, protects: str) -> str:
    """The key in the environment variable ``variable``, empty for none.

    Raises ``ConfigError`` when there is no key and ``host`` is reachable from the network; ``protects`` says what
    anybody there could use then.
    """
    key = os.environ.get(variable, "")
    if not key and not _is_loopback(host):
        raise ConfigError(
            f"--host {host}: others on the network could use {protects}; export "
            f"{variable or 'a key and name it with --api-key-env'}=..., or listen on 127.0.0.1"
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
