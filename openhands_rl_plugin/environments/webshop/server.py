"""Running the shop as a server: in the foreground, or in a thread for tests and demos."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openhands_rl_plugin.core import http_server
from openhands_rl_plugin.environments.webshop.app import create_app
from openhands_rl_plugin.environments.webshop.engine import WebShop

# No lifespan and no WebSockets; a request takes milliseconds, so two seconds are enough to finish running ones.
_SERVER_OPTIONS: dict[str, Any] = {"lifespan": "off", "ws": "none", "timeout_graceful_shutdown": 2}


def serve(
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    world: WebShop | None = None,
    session_ttl_s: float = 1800.0,
    max_sessions: int = 10_000,
) -> None:
    """Serve the shop until interrupted.

    Args:
        host: the address to listen on.
        port: the port; 0 takes a free one.
        world: the shop; the default one when None.
        session_ttl_s: seconds without use after which a session expires.
        max_sessions: the most sessions at once.

    Raises:
        PortUnavailableError: the address is taken, forbidden or unknown; the message names the remedy.
    """
    app = create_app(world or WebShop(), session_ttl_s=session_ttl_s, max_sessions=max_sessions)
    with http_server.listening(host, port) as listener:
        http_server.serve(app, listener, **_SERVER_OPTIONS)


@contextmanager
def running_webshop(
    world: WebShop | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    session_ttl_s: float = 1800.0,
    max_sessions: int = 10_000,
) -> Iterator[str]:
    """Serve the shop from a background thread and yield its base URL, `http://host:port`; stop on exit.

    Raises:
        PortUnavailableError: the address cannot be listened on.
    """
    app = create_app(world or WebShop(), session_ttl_s=session_ttl_s, max_sessions=max_sessions)
    with (
        http_server.listening(host, port) as listener,
        http_server.serving(app, listener, **_SERVER_OPTIONS) as url,
    ):
        yield url
