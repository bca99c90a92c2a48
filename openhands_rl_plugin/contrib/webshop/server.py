"""Running the shop as a server, in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.routing import Route

from openhands_rl_plugin.contrib.webshop.app import MAX_BODY_BYTES, create_app
from openhands_rl_plugin.contrib.webshop.engine import WebShop
from openhands_rl_plugin.core.servers.connections import ConnectionLimits
from openhands_rl_plugin.core.servers.door import API_KEY, Door, required_key
from openhands_rl_plugin.core.servers.listening import listening, serving

_STOP_SECONDS = 2
"""A request takes milliseconds, so that is enough to finish running ones."""


@contextmanager
def running_webshop(
    world: WebShop | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key_env: str = API_KEY,
    session_ttl_s: float = 1800.0,
    max_sessions: int = 10_000,
    limits: ConnectionLimits | None = None,
) -> Iterator[str]:
    """Serve the shop from a background thread and yield its base URL, `http://host:port`; stop on exit.

    Args:
        world: the shop; the default one when None.
        host: the address to listen on; any but loopback needs a key.
        port: the port; 0 takes a free one.
        api_key_env: the environment variable with the key that clients must send; unset: no key is required.
        session_ttl_s: seconds without use after which a session expires.
        max_sessions: the most sessions at once.
        limits: bounds on connections.

    Raises:
        ConfigError: a public host has no key.
        PortUnavailableError: the address cannot be listened on; the message names the remedy.
    """
    door = Door(required_key(host, api_key_env, protects="its sessions"))
    with listening(host, port) as listener:
        app = create_app(world or WebShop(), session_ttl_s=session_ttl_s, max_sessions=max_sessions)
        with serving(
            app,
            listener,
            door=door,
            routes=[route.path for route in app.routes if isinstance(route, Route)],
            max_body_bytes=MAX_BODY_BYTES,
            limits=limits,
            lifespan="off",
            timeout_graceful_shutdown=_STOP_SECONDS,
        ) as url:
            yield url
