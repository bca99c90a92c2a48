"""Run the embedded server: in the foreground, or in a thread beside the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from openhands_rl_plugin.core import http_server
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.server.app import build_app


def serve(config: ServerConfig) -> None:
    """Serve until interrupted.

    Raises ``PortUnavailableError`` when the port is taken, ``StartError`` when the model cannot be loaded.
    """
    with http_server.listening(config.host, config.port) as listener, Generator(config) as generator:
        http_server.serve(build_app(config, generator), listener, lifespan="off")


@contextmanager
def running_server(config: ServerConfig, generator: Generator | None = None) -> Iterator[str]:
    """A server in a background thread; yields its base URL (``http://127.0.0.1:PORT``).

    With a ``generator`` that one is served and stays open; else one is loaded and closed. Raises as ``serve`` does.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(http_server.listening(config.host, config.port))
        app = build_app(config, generator or stack.enter_context(Generator(config)))
        yield stack.enter_context(http_server.serving(app, listener, lifespan="off"))
