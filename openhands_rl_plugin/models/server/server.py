"""Run the embedded server in a thread beside the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from starlette.routing import Route

from openhands_rl_plugin.core.servers.connections import ConnectionLimits
from openhands_rl_plugin.core.servers.listening import listening, serving
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.server.app import build_app


@contextmanager
def running_server(
    config: ServerConfig, generator: Generator | None = None, *, limits: ConnectionLimits | None = None
) -> Iterator[str]:
    """As ``open_server``; yields the URL alone."""
    with open_server(config, generator, limits=limits) as (url, _):
        yield url


@contextmanager
def open_server(
    config: ServerConfig, generator: Generator | None = None, *, limits: ConnectionLimits | None = None
) -> Iterator[tuple[str, Generator]]:
    """A server in a background thread; yields its base URL (``http://127.0.0.1:PORT``) and what it serves.

    With a ``generator`` that one is served and stays open; else one is loaded and closed. Raises ``ConfigError`` when
    a public host has no key, ``PortUnavailableError`` when the port is taken, ``StartError`` when the model cannot be
    loaded.
    """
    door = config.door()
    with ExitStack() as stack:
        listener = stack.enter_context(listening(config.host, config.port))
        served = generator or stack.enter_context(Generator(config))
        app = build_app(config, served)
        url = stack.enter_context(
            serving(
                app,
                listener,
                door=door,
                routes=[route.path for route in app.routes if isinstance(route, Route)],
                max_body_bytes=config.max_body_bytes,
                limits=limits,
                metrics=served.metrics.metrics,
                lifespan="off",
            )
        )
        yield url, served
