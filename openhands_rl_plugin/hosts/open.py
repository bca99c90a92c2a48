"""The runner of OpenHands episodes that the settings ask for: in this process, in worker processes, in Ray actors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.hosts.local import HostRunner, local_runner
from openhands_rl_plugin.hosts.pool.runner import WorkerPoolRunner
from openhands_rl_plugin.hosts.shared.options import HostOptions


def make_runner(
    settings: RLSettings,
    options: HostOptions | None = None,
    *,
    storage: TrajectoryStorage | None = None,
    workers: int = 0,
) -> HostRunner:
    """A runner over ``workers`` workers, of the kind that ``[rl] executor`` names; 0 runs sessions in this process.

    With a ``storage`` every episode is stored while it runs. Raises ``ConfigError`` for settings that the host cannot
    use, and as ``join_cluster``.
    """
    if not workers:
        return local_runner(settings, options, storage=storage)
    if settings.executor == "ray":
        from openhands_rl_plugin.hosts.pool.ray_workers import RayWorker, join_cluster

        join_cluster()
        return WorkerPoolRunner(settings, options, workers=workers, storage=storage, kind=RayWorker)
    return WorkerPoolRunner(settings, options, workers=workers, storage=storage)


@asynccontextmanager
async def open_runner(
    settings: RLSettings,
    options: HostOptions | None = None,
    *,
    storage: TrajectoryStorage | None = None,
    workers: int = 0,
) -> AsyncIterator[HostRunner]:
    """``make_runner``, closed at the end of the block."""
    runner = make_runner(settings, options, storage=storage, workers=workers)
    try:
        yield runner
    finally:
        await runner.close()
