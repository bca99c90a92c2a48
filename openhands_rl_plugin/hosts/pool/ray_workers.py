"""Workers on a Ray cluster: actors instead of processes of this machine.

Everything else is as in ``runner``: the limit of concurrent episodes, the replacement of workers, and the storage,
which only this process writes to. The machines of the cluster need this package, access to the model server and the
environment, and the environment variables that the settings name, whose values are never sent. Messages are bytes to
Ray.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import CaughtFailure, InfrastructureError, MissingExtraError, boundary
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.hosts.pool.connection import WorkerChannel
from openhands_rl_plugin.hosts.pool.messages import FromWorker, to_line
from openhands_rl_plugin.hosts.pool.processes import CLOSE_TIMEOUT
from openhands_rl_plugin.hosts.pool.runner import WorkerPoolRunner
from openhands_rl_plugin.hosts.pool.worker import EpisodeWorker
from openhands_rl_plugin.hosts.shared.options import HostOptions

# Send no usage statistics. On a busy machine Ray's own processes need longer than its 30 seconds to register.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",
}


class RayPoolRunner(WorkerPoolRunner):
    """A ``WorkerPoolRunner`` of ``workers`` Ray actors, each with ``cpus`` of its machine.

    It uses the cluster of ``RAY_ADDRESS``, else the one that this process is connected to, else it starts a local one.
    Raises ``MissingExtraError`` without Ray, ``InfrastructureError`` when the cluster does not answer.
    """

    def __init__(
        self,
        settings: RLSettings,
        options: HostOptions | None = None,
        *,
        workers: int = 2,
        storage: TrajectoryStorage | None = None,
        cpus: float = 1.0,
    ) -> None:
        super().__init__(settings, options, workers=workers, storage=storage)
        self._cpus = cpus
        _join_cluster()

    async def _connect(self) -> WorkerChannel:
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        return RayChannel(ray.remote(EpisodeActor).options(num_cpus=self._cpus).remote())


class EpisodeActor:
    """One worker on the cluster. Ray calls the methods, several concurrently."""

    def __init__(self) -> None:
        self._outbox: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._worker = EpisodeWorker(self._outbox.put)

    async def receive(self, line: bytes) -> None:
        """Handle one message of the pool."""
        await self._worker.receive(line)

    async def outbox(self) -> list[bytes]:
        """The messages for the pool, as soon as there is one."""
        lines = [to_line(await self._outbox.get())]
        while not self._outbox.empty():
            lines.append(to_line(self._outbox.get_nowait()))
        return lines

    async def close(self) -> None:
        """End the episodes; returns when their sessions are closed."""
        await self._worker.close()


class RayChannel:
    """A ``WorkerChannel`` to one ``EpisodeActor``."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._exit_message = ""

    async def send(self, line: bytes) -> None:
        """As in ``WorkerChannel``. An actor that raises is killed; a process would exit by itself."""
        try:
            await _called(self._actor.receive.remote(line))
        except InfrastructureError as error:
            self._exit_message = str(error)
            self.kill()

    async def receive(self) -> Sequence[bytes]:
        """As in ``WorkerChannel``."""
        try:
            return await _called(self._actor.outbox.remote())
        except InfrastructureError as error:
            self._exit_message = self._exit_message or str(error)
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


async def _called[T](call: Awaitable[T]) -> T:
    """The result of a call to an actor. Raises ``InfrastructureError`` when the actor is gone."""
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "ray"):
            return await call
    except CaughtFailure as caught:
        raise InfrastructureError(f"a Ray actor ended: {caught.failure.message}") from caught


def _join_cluster() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray  # pyright: ignore[reportMissingImports]  # an extra
    except ModuleNotFoundError as error:
        raise MissingExtraError("ray", "ray") from error
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "ray"):
            ray.init(log_to_driver=False, configure_logging=False, **options)
    except CaughtFailure as caught:
        where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
        raise InfrastructureError(f"{where} cannot be used: {caught.failure.message}; see `ray status`") from caught
