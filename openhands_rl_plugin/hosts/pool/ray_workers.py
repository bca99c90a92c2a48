"""Workers on a Ray cluster: actors instead of processes of this machine.

Everything else is as in ``runner``: the limit of concurrent episodes, the replacement of workers, and the storage,
which only this process writes to. What the machines of the cluster need is said in ``ray_cluster``.
"""

from __future__ import annotations

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.hosts.pool.connection import WorkerChannel
from openhands_rl_plugin.hosts.pool.ray_cluster import Actor, join_cluster, started_actor
from openhands_rl_plugin.hosts.pool.runner import WorkerPoolRunner
from openhands_rl_plugin.hosts.pool.worker import EpisodeWorker
from openhands_rl_plugin.hosts.shared.options import HostOptions


class RayPoolRunner(WorkerPoolRunner):
    """A ``WorkerPoolRunner`` of ``workers`` Ray actors, each with ``cpus`` of its machine.

    Joins the cluster as ``join_cluster`` does, and raises what it raises.
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
        join_cluster()

    async def _connect(self) -> WorkerChannel:
        return started_actor(EpisodeActor, cpus=self._cpus)


class EpisodeActor(Actor):
    """One worker on the cluster."""

    def __init__(self) -> None:
        super().__init__()
        self._worker = EpisodeWorker(self.send)

    async def receive(self, line: bytes) -> None:
        """Handle one message of the pool."""
        await self._worker.receive(line)

    async def close(self) -> None:
        """End the episodes; returns when their sessions are closed."""
        await self._worker.close()
