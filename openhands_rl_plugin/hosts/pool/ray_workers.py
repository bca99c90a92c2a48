"""Workers on a Ray cluster: actors that get and send messages, as worker processes do on their pipes.

Everything else is as in ``runner``: the limit of concurrent episodes, the replacement of workers, and the storage,
which only this process writes to. The machines of the cluster need this package, access to the model server and the
environment, and the environment variables that the settings name, whose values are never sent. Messages are bytes to
Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any

from openhands_rl_plugin.core.errors import CaughtFailure, InfrastructureError, boundary, from_extra
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.hosts.pool.connection import WorkerChannel
from openhands_rl_plugin.hosts.pool.runner import CLOSE_TIMEOUT, WorkerPoolRunner
from openhands_rl_plugin.hosts.pool.worker import EpisodeWorker

ADDRESS = "RAY_ADDRESS"
"""The environment variable that names the cluster; without it a local one is started."""

# Send no usage statistics. On a busy machine Ray's own processes need longer than its 30 seconds to register.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}


class EpisodeActor:
    """One worker on the cluster. Ray calls the methods, several concurrently."""

    def __init__(self) -> None:
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._worker = EpisodeWorker(self._outbox.put)

    async def outbox(self) -> list[bytes]:
        """The worker's messages, as soon as there is one."""
        messages = [await self._outbox.get()]
        while not self._outbox.empty():
            messages.append(self._outbox.get_nowait())
        return messages

    async def receive(self, message: bytes) -> None:
        """Handle one message of the pool."""
        self._worker.receive(message)

    async def close(self) -> None:
        """End the episodes; returns when their sessions are closed. The actor is killed afterwards."""
        await self._worker.close()


class RayChannel:
    """A ``WorkerChannel`` to one ``EpisodeActor``."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._exit_message = ""

    async def send(self, message: bytes) -> None:
        """As in ``WorkerChannel``."""
        with suppress(InfrastructureError):
            await _called(self._actor.receive.remote(message))

    async def receive(self) -> Sequence[bytes]:
        """As in ``WorkerChannel``."""
        try:
            return await _called(self._actor.outbox.remote())
        except InfrastructureError as error:
            self._exit_message = str(error)
            return ()

    async def exit_message(self) -> str:
        """As in ``WorkerChannel``."""
        return self._exit_message

    def kill(self) -> None:
        """As in ``WorkerChannel``."""
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        ray.kill(self._actor)

    async def close(self) -> None:
        """As in ``WorkerChannel``."""
        with suppress(TimeoutError, InfrastructureError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await _called(self._actor.close.remote())
        self.kill()


def join_cluster() -> None:
    """Use the cluster of ``RAY_ADDRESS``, else the one that this process is connected to, else start a local one.

    Raises ``MissingExtraError`` without Ray, ``InfrastructureError`` when the cluster does not answer.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with from_extra("ray", "ray"):
        import ray  # pyright: ignore[reportMissingImports]  # an extra
    if ray.is_initialized():
        return
    address = os.environ.get(ADDRESS)
    options: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    ends = signal.getsignal(signal.SIGTERM)
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "ray"):
            ray.init(log_to_driver=False, configure_logging=False, **options)
            if ends is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, ends)  # Ray's own exits at once, and nothing is given back
    except CaughtFailure as caught:
        where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
        raise InfrastructureError(f"{where} cannot be used: {caught.failure.message}; see `ray status`") from caught


def cluster_machines() -> frozenset[str]:
    """The addresses of the cluster's machines. Raises ``InfrastructureError``."""
    import ray  # pyright: ignore[reportMissingImports]  # an extra

    try:
        with boundary(FailureKind.INFRASTRUCTURE, "ray"):
            return frozenset(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])
    except CaughtFailure as caught:
        raise InfrastructureError(f"the Ray cluster does not answer: {caught.failure.message}") from caught


async def _called[T](call: Awaitable[T]) -> T:
    """The result of a call to an actor. Raises ``InfrastructureError`` when the actor is gone."""
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "ray"):
            return await call
    except CaughtFailure as caught:
        raise InfrastructureError(f"a Ray actor ended: {caught.failure.message}") from caught


class RayPoolRunner(WorkerPoolRunner):
    """A ``WorkerPoolRunner`` of Ray actors, each with a CPU of its machine, after ``join_cluster``."""

    async def _connect(self) -> WorkerChannel:
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        try:
            with boundary(FailureKind.INFRASTRUCTURE, "ray"):
                return RayChannel(ray.remote(EpisodeActor).options(num_cpus=1).remote())
        except CaughtFailure as caught:
            raise InfrastructureError(f"no Ray actor could be started: {caught.failure.message}") from caught
