"""Running the shop as a server: in the foreground, or in a thread for tests and demos."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.environments.webshop.app import create_app
from openhands_rl_plugin.environments.webshop.engine import WebShop

_BACKLOG = 1024
_HIGHEST_PORT = 65_535
_STOP_LIMIT_S = 30.0


class PortUnavailableError(RLError):
    """The address cannot be listened on."""


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
        PortUnavailableError: the address is taken, forbidden or unknown; one line that says what to do.
    """
    with _listening(host, port) as listener:
        _server(world or WebShop(), session_ttl_s, max_sessions).run(sockets=[listener])


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
    with _listening(host, port) as listener:
        server = _server(world or WebShop(), session_ttl_s, max_sessions)
        thread = threading.Thread(target=server.run, args=([listener],), name="webshop", daemon=True)
        thread.start()
        # The listener takes connections already, so a first request made now only waits for the loop to start.
        try:
            yield f"http://{host}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(_STOP_LIMIT_S)


def _server(world: WebShop, session_ttl_s: float, max_sessions: int) -> uvicorn.Server:
    app = create_app(world, session_ttl_s=session_ttl_s, max_sessions=max_sessions)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=2
    )
    return uvicorn.Server(config)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    where = f"cannot listen on {host}:{port}"
    if not 0 <= port <= _HIGHEST_PORT:
        raise PortUnavailableError(f"{where}: a port is between 0 and {_HIGHEST_PORT}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise PortUnavailableError(f"{where}: {error.strerror}; choose another host") from error
    # asyncio switches Nagle's algorithm off only where the protocol is named; left on, each answer waits 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise PortUnavailableError(f"{where}: {_remedy(error)}") from error
        yield listener


def _remedy(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; choose another one or stop the server that has it"
    return f"{error.strerror}; choose another host or port"
