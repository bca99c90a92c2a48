"""Listening on an address, and an ASGI application served from a thread."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.servers.asgi import MIB, GuardedApp
from openhands_rl_plugin.core.servers.connections import ConnectionLimits, Connections
from openhands_rl_plugin.core.servers.door import Door
from openhands_rl_plugin.core.servers.metrics import Metrics
from openhands_rl_plugin.core.servers.observed import ObservedRequests

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 1024
_HIGHEST_PORT = 65_535
_START_SECONDS = 30.0
"""Far more than a start takes; until then a lifespan may open its store."""
STOP_SECONDS = 5
"""What requests under way have to end in, when the server is stopped."""


class PortUnavailableError(ConfigError):
    """The address cannot be listened on: it is taken, forbidden or unknown. One line with the remedy."""


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens on ``host`` and ``port`` (0: a free one) until the block ends.

    Open it before anything slow (a model that is loaded), so that an occupied port shows at once. Raises
    ``PortUnavailableError``.
    """
    where = f"cannot listen on {host}:{port}"
    if not 0 <= port <= _HIGHEST_PORT:
        raise PortUnavailableError(f"{where}: a port is between 0 and {_HIGHEST_PORT}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A name such as "localhost" may have both kinds of address; clients that try one only try IPv4.
        family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    except OSError as error:
        raise PortUnavailableError(f"{where}: {error.strerror}; choose another host") from error
    # asyncio switches Nagle's algorithm off only where the protocol is named; left on, each answer waits 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            raise PortUnavailableError(f"{where}: {_remedy(error)}") from error
        yield listener


def _remedy(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; choose another one or stop the server that has it"
    return f"{error.strerror or error}; choose another host or port"


def url_of(listener: socket.socket) -> str:
    """``http://HOST:PORT`` of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def serving(
    app: Any,
    listener: socket.socket,
    *,
    door: Door | None = None,
    routes: Collection[str] = (),
    max_body_bytes: int = 16 * MIB,
    limits: ConnectionLimits | None = None,
    metrics: Metrics | None = None,
    **options: Any,
) -> Iterator[str]:
    """Serve an ASGI application from a thread until the block ends; yields its URL as soon as it answers.

    ``door``: who is let in; by default there is no key. ``routes``: the paths that ``/metrics`` tells apart; to
    ``metrics`` those of the requests are added. ``options`` are those of ``uvicorn.Config``. Raises
    ``InfrastructureError`` when it does not start.
    """
    connections, metrics = Connections(limits), metrics or Metrics()
    guard = GuardedApp(
        app,
        door or Door(),
        max_body_bytes=max_body_bytes,
        connections=connections,
        metrics=metrics,
        observed=ObservedRequests(metrics, connections, routes),
    )
    server = _server(guard, connections, options)
    thread = threading.Thread(target=server.run, args=([listener],), name="http-server", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise InfrastructureError(f"the HTTP server at {url_of(listener)} did not start; see its log")
            time.sleep(0.01)
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join()


def _server(app: Any, connections: Connections, options: dict[str, Any]) -> uvicorn.Server:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    common: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "timeout_graceful_shutdown": STOP_SECONDS,
        "timeout_keep_alive": round(connections.limits.idle),
        "http": connections.bounded(H11Protocol),
        "ws": "none",
        "backlog": BACKLOG,
        "server_header": False,
    }
    return uvicorn.Server(uvicorn.Config(app, **common | options))
