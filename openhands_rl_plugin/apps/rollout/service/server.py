"""Runs the service in a thread beside its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from starlette.routing import Route

from openhands_rl_plugin.apps.rollout.service.app import RolloutDoor, build_app
from openhands_rl_plugin.apps.rollout.service.keeper import Keeper
from openhands_rl_plugin.apps.rollout.service.owners import only_server
from openhands_rl_plugin.apps.rollout.service.queue import JobQueue
from openhands_rl_plugin.config.rollouts import ServiceOptions
from openhands_rl_plugin.core.servers.connections import ConnectionLimits
from openhands_rl_plugin.core.servers.door import required_key
from openhands_rl_plugin.core.servers.listening import listening, serving


@contextmanager
def running_service(service: ServiceOptions, folder: Path, *, limits: ConnectionLimits | None = None) -> Iterator[str]:
    """The service over the store and the queue in ``folder``; yields its URL. What was in the queue goes on.

    Raises ``ConfigError`` for options that no episode can be played with, a public address without a key and a folder
    that another service has, ``PortUnavailableError``, and ``StorageError``.
    """
    key = required_key(service.listen, service.service_key_env, protects="the model and this machine's processors")
    stops: list[Callable[[], object]] = []
    with (
        only_server(folder),
        closing(JobQueue(folder, most_waiting=service.most_waiting)) as queue,
        listening(service.listen, service.port) as listener,
    ):
        app = build_app(queue, Keeper(queue, folder, service), service, stops.append)
        with serving(
            app,
            listener,
            door=RolloutDoor(key),
            routes=[route.path for route in app.routes if isinstance(route, Route)],
            max_body_bytes=service.max_body_bytes,
            limits=limits,
            log_level="critical",
            lifespan="on",
        ) as url:
            try:
                yield url
            finally:
                for stop in stops:
                    stop()
