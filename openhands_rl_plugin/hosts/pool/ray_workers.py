"""Workers on a Ray cluster: one actor each, with a CPU of its machine.

The machines of the cluster need this package, access to the model server and the environment, and the environment
variables that the settings name, whose values are never sent. Only this process writes to the storage.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openhands_rl_plugin.core.errors import CaughtFailure, InfrastructureError, boundary, from_extra
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.hosts.pool.runner import Worker
from openhands_rl_plugin.hosts.pool.worker import EpisodeWorker

ADDRESS = "RAY_ADDRESS"
"""The environment variable that names the cluster; without it a local one is started."""

# Send no usage statistics. On a busy machine Ray's own processes need longer than its 30 seconds to register.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}


def _ray() -> Any:
    with from_extra("ray", "ray"):
        return importlib.import_module("ray")


@contextmanager
def _failing_as(what: str, then: str = "") -> Iterator[None]:
    """Raises Ray's errors as ``InfrastructureError``."""
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "ray"):
            yield
    except CaughtFailure as caught:
        raise InfrastructureError(f"{what}: {caught.failure.message}{then}") from caught


def join_cluster() -> None:
    """Use the cluster of ``RAY_ADDRESS``, else the one that this process is connected to, else start a local one.

    Raises ``MissingExtraError`` without Ray, ``InfrastructureError`` when the cluster does not answer.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray = _ray()
    if ray.is_initialized():
        return
    address = os.environ.get(ADDRESS)
    options: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
    ends = signal.getsignal(signal.SIGTERM)
    with _failing_as(f"{where} cannot be used", "; see `ray status`"):
        ray.init(log_to_driver=False, configure_logging=False, **options)
        if ends is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ends)  # Ray's own exits at once, and nothing is given back


def cluster_machines() -> frozenset[str]:
    """The addresses of the cluster's machines. Raises ``InfrastructureError``."""
    with _failing_as("the Ray cluster does not answer"):
        return frozenset(str(node["NodeManagerAddress"]) for node in _ray().nodes() if node["Alive"])


class RayWorker(Worker):
    """An ``EpisodeWorker`` as an actor, after ``join_cluster``."""

    def __init__(self, *given: Any) -> None:
        with _failing_as("no Ray actor could be started"):
            self._actor = _ray().remote(EpisodeWorker).options(num_cpus=1).remote()
        super().__init__(*given)

    def kill(self) -> None:
        """As in ``Worker``."""
        _ray().kill(self._actor)

    async def _answer(self, call: bytes) -> bytes:
        with _failing_as("a Ray actor ended"):
            return await self._actor.answer.remote(call)
