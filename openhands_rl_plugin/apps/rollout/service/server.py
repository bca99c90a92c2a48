"""Runs the service in a thread beside its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from starlette.routing import Route

from openhands_rl_plugin.apps.rollout.service.app import RolloutDoor, build_app
from openhands_rl_plugin.apps.rollout.service.keeper import Keeper
from openhands_rl_plugin.apps.rollout.service.owners import only_server
from openhands_rl_plugin.apps.rollout.service.queue import JobQueue
from openhands_rl_plugin.apps.rollout.service.summaries import samples_of
from openhands_rl_plugin.apps.rollout.service.worker import Orders
from openhands_rl_plugin.config.rollouts import ServiceOptions
from openhands_rl_plugin.core.servers.connections import ConnectionLimits
from openhands_rl_plugin.core.servers.door import required_key
from openhands_rl_plugin.core.servers.listening import listening, serving
from openhands_rl_plugin.core.servers.metrics import Metrics
from openhands_rl_plugin.models.balancing.balancer import Balancer, running_balancer


@contextmanager
def running_service(service: ServiceOptions, folder: Path, *, limits: ConnectionLimits | None = None) -> Iterator[str]:
    """The service over the store and the queue in ``folder``; yields its URL. What was in the queue goes on.

    Raises ``ConfigError`` for options that no episode can be played with, a public address without a key and a folder
    that another service has, ``PortUnavailableError``, and ``StorageError``.
    """
    key = required_key(service.listen, service.service_key_env, protects="the model and this machine's processors")
    settled = service.settled
    timeout = settled.options().settings().serving.request_timeout
    stops: list[Callable[[], object]] = []
    metrics = Metrics()
    with ExitStack() as opened:
        opened.enter_context(only_server(folder))
        queue = JobQueue(folder, most_waiting=service.most_waiting, max_policy_lag=service.max_policy_lag)
        opened.enter_context(closing(queue))
        listener = opened.enter_context(listening(service.listen, service.port))
        balancer = Balancer(service.base_urls, timeout=timeout) if service.base_urls else None
        behind = "" if balancer is None else opened.enter_context(running_balancer(balancer, metrics))
        orders = Orders(folder=folder, service=settled, balancer=behind)
        app = build_app(queue, Keeper(queue, orders), settled, stops.append, balancer)
        metrics.read("rollout_sessions", "Episodes in the queue, by state.", lambda: samples_of(queue.database))
        url = opened.enter_context(
            serving(
                app,
                listener,
                door=RolloutDoor(key),
                routes=[route.path for route in app.routes if isinstance(route, Route)],
                max_body_bytes=service.max_body_bytes,
                limits=limits,
                metrics=metrics,
                log_level="critical",
                lifespan="on",
            )
        )
        try:
            yield url
        finally:
            for stop in stops:
                stop()
