"""Run the embedded server: in the foreground, or in a thread beside the caller."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import uvicorn

from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.generator.errors import StartError
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.server.app import build_app

_START_SECONDS = 30


def serve(config: ServerConfig) -> None:
    """Serve until interrupted. Raises StartError with one line: the port is taken, the model cannot be loaded."""
    with _listen(config) as listener, Generator(config) as generator:
        _server(config, generator).run(sockets=[listener])


@contextmanager
def running_server(config: ServerConfig, generator: Generator | None = None) -> Iterator[str]:
    """A server in a background thread; yields its base URL (`http://127.0.0.1:PORT`).

    With a `generator` that one is served and stays open; else one is loaded and closed. Raises StartError.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(config))
        server = _server(config, generator or stack.enter_context(Generator(config)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
        thread.start()
        try:
            _wait_started(server, thread)
            host, port = listener.getsockname()[:2]
            yield f"http://{host}:{port}"
        finally:
            server.should_exit = True
            thread.join()


def _server(config: ServerConfig, generator: Generator) -> uvicorn.Server:
    app = build_app(config, generator)
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    )


def _listen(config: ServerConfig) -> socket.socket:
    """Bind first: loading a model takes seconds, an occupied port shows at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; choose another port"
        ) from error
    return listener


def _wait_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise StartError("the HTTP server did not start; see its log")
        time.sleep(0.01)
