"""Runs the agent endpoint in a thread beside its caller."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn

from openhands_rl_plugin.apps.endpoint.agent import AgentRuntime
from openhands_rl_plugin.apps.endpoint.app import OpenRuntime, build_app
from openhands_rl_plugin.apps.endpoint.build import opened_runtime
from openhands_rl_plugin.apps.endpoint.config import AgentConfig
from openhands_rl_plugin.core.errors import ConfigError, RLError

_START_SECONDS = 30.0


@contextmanager
def running_agent(config: AgentConfig, open_runtime: OpenRuntime | None = None) -> Iterator[str]:
    """A server in a background thread; yields its URL, without ``/v1``.

    ``open_runtime`` gives the agent, by default one over the configured model server. Raises ``ConfigError`` for what
    cannot be used, ``StorageError`` for a store that cannot be opened.
    """
    start = _Start(open_runtime or (lambda: opened_runtime(config)))
    app = build_app(config, start.opened)
    with _listen(config) as listener:
        options = {"log_level": "critical", "access_log": False, "lifespan": "on", "timeout_graceful_shutdown": 5}
        server = uvicorn.Server(uvicorn.Config(app, **options))
        thread = threading.Thread(target=_serve, args=(server, listener), name="agent", daemon=True)
        thread.start()
        try:
            start.wait(server, thread)
            host, port = listener.getsockname()[:2]
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            server.should_exit = True
            thread.join()


class _Start:
    """Carries what went wrong in the server's thread to the one that waits for it."""

    def __init__(self, open_runtime: OpenRuntime) -> None:
        self._open_runtime = open_runtime
        self._error: RLError | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[AgentRuntime]:
        try:
            async with self._open_runtime() as runtime:
                yield runtime
        except RLError as error:
            self._error = error
            raise

    def wait(self, server: uvicorn.Server, thread: threading.Thread) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise self._error or ConfigError("the agent endpoint did not start within its time; start it again")
            time.sleep(0.01)


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    # A start that failed is told by the one who waits for it.
    with suppress(SystemExit):
        server.run(sockets=[listener])


def _listen(config: AgentConfig) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; choose another --port"
        ) from error
    return listener
