"""Runs the studio in a thread beside its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from starlette.routing import Route

from openhands_rl_plugin.contrib.studio.app import build_app
from openhands_rl_plugin.contrib.studio.config import StudioConfig
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.contrib.studio.tickets import Tickets
from openhands_rl_plugin.core.servers.connections import ConnectionLimits
from openhands_rl_plugin.core.servers.listening import STOP_SECONDS, listening, serving


class RunningStudio(NamedTuple):
    """``url``: without a token; ``link`` opens one browser."""

    url: str
    tickets: Tickets

    @property
    def link(self) -> str:
        """The address for the next browser; it works once."""
        return f"{self.url}/?token={self.tickets.token}"


@contextmanager
def running_studio(
    config: StudioConfig,
    sources: StudioSources,
    *,
    limits: ConnectionLimits | None = None,
    ends_in: int = STOP_SECONDS,
) -> Iterator[RunningStudio]:
    """A server in a background thread, which closes ``sources`` at the end.

    ``ends_in``: seconds that requests under way have then.
    Raises ``ConfigError`` for a public host without a key and for a tokenizer that cannot be read,
    ``PortUnavailableError`` when the port is taken.
    """
    tickets = Tickets()
    door = config.door(tickets)
    stops: list[Callable[[], object]] = []
    app = build_app(config, sources, tickets, door.key, stops.append)
    routes = [route.path for route in app.routes if isinstance(route, Route)]
    with (
        listening(config.host, config.port) as listener,
        serving(
            app,
            listener,
            door=door,
            routes=routes,
            max_body_bytes=config.max_body_bytes,
            limits=limits,
            log_level="critical",
            lifespan="on",
            timeout_graceful_shutdown=ends_in,
        ) as url,
    ):
        try:
            yield RunningStudio(url, tickets)
        finally:
            for stop in stops:
                stop()
