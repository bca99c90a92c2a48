"""Runs the service in a thread beside its caller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from starlette.routing import Route

from openhands_rl_plugin.config.rollout import with_absolute_paths
from openhands_rl_plugin.contrib.rollouts.app import RolloutDoor, build_app
from openhands_rl_plugin.contrib.rollouts.keeper import Keeper
from openhands_rl_plugin.contrib.rollouts.owners import only_server
from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.settings import ServiceOptions
from openhands_rl_plugin.contrib.rollouts.summaries import samples_of
from openhands_rl_plugin.contrib.rollouts.worker import Orders
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.servers.connections import ConnectionLimits
from openhands_rl_plugin.core.servers.door import is_loopback, required_key
from openhands_rl_plugin.core.servers.listening import listening, serving
from openhands_rl_plugin.core.servers.metrics import Metrics
from openhands_rl_plugin.hosts.pool.ray_cluster import cluster_machines, join_cluster
from openhands_rl_plugin.models.balancing.balancer import Balancer, running_balancer


def refuse_loopback(base_url: str, machines: Collection[str]) -> None:
    """Raises ``ConfigError`` for an endpoint that only one of the cluster's machines reaches under this address."""
    host = urlsplit(base_url).hostname or ""
    if len(machines) > 1 and is_loopback(host):
        raise ConfigError(
            f"--base-url {base_url}: {host} is another server on each of the Ray cluster's {len(machines)} machines; "
            "give an address that all of them reach"
        )


@contextmanager
def running_service(service: ServiceOptions, folder: Path, *, limits: ConnectionLimits | None = None) -> Iterator[str]:
    """The service over the store and the queue in ``folder``; yields its URL. What was in the queue goes on.

    Raises ``ConfigError`` for options that no episode can be played with, a public address without a key and a folder
    that another service has, ``PortUnavailableError``, ``StorageError``, and for a Ray cluster as ``join_cluster``.
    """
    key = required_key(service.listen, service.service_key_env, protects="the model and this machine's processors")
    settled = with_absolute_paths(service.settled)
    serving_settings = settled.options().settings().serving
    stops: list[Callable[[], object]] = []
    metrics = Metrics()
    with ExitStack() as opened:
        opened.enter_context(only_server(folder))
        if service.executor == "ray":
            join_cluster()
            refuse_loopback(serving_settings.base_url, cluster_machines())
        queue = JobQueue(folder, most_waiting=service.most_waiting, max_policy_lag=service.max_policy_lag)
        opened.enter_context(closing(queue))
        listener = opened.enter_context(listening(service.listen, service.port))
        balancer = Balancer(service.base_urls, timeout=serving_settings.request_timeout) if service.base_urls else None
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
