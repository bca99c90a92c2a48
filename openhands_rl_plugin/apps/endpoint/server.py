"""Runs the agent endpoint in a thread beside its caller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.routing import Route

from openhands_rl_plugin.apps.endpoint.agent import AgentRuntime
from openhands_rl_plugin.apps.endpoint.app import OpenRuntime, build_app
from openhands_rl_plugin.apps.endpoint.build import opened_runtime
from openhands_rl_plugin.apps.endpoint.config import AgentConfig
from openhands_rl_plugin.core.errors import InfrastructureError, RLError
from openhands_rl_plugin.core.servers.connections import ConnectionLimits
from openhands_rl_plugin.core.servers.listening import listening, serving


@contextmanager
def running_agent(
    config: AgentConfig, open_runtime: OpenRuntime | None = None, *, limits: ConnectionLimits | None = None
) -> Iterator[str]:
    """A server in a background thread; yields its URL, without ``/v1``.

    ``open_runtime`` opens the agent; the default uses the configured model server. Raises ``ConfigError`` for invalid
    options, ``StorageError`` for a store that cannot be opened.
    """
    door = config.door()
    start = _Start(open_runtime or (lambda: opened_runtime(config)))
    app = build_app(config, start.opened)
    with listening(config.host, config.port) as listener:
        try:
            with serving(
                app,
                listener,
                door=door,
                routes=[route.path for route in app.routes if isinstance(route, Route)],
                max_body_bytes=config.max_body_bytes,
                limits=limits,
                log_level="critical",
                lifespan="on",
            ) as url:
                yield url
        except InfrastructureError:
            if start.error is None:
                raise
            raise start.error from None


class _Start:
    """Passes a startup error from the server's thread to the caller."""

    def __init__(self, open_runtime: OpenRuntime) -> None:
        self._open_runtime = open_runtime
        self.error: RLError | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[AgentRuntime]:
        try:
            async with self._open_runtime() as runtime:
                yield runtime
        except RLError as error:
            self.error = error
            raise
