"""A pool of workers for OpenHands episodes: ``[rl] executor`` says of which kind."""

from __future__ import annotations

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.hosts.pool.processes import WorkerPoolRunner
from openhands_rl_plugin.hosts.shared.options import ControllerOptions


def open_pool(
    settings: RLSettings,
    options: ControllerOptions | None = None,
    *,
    workers: int = 2,
    storage: TrajectoryStorage | None = None,
) -> WorkerPoolRunner:
    """``workers`` processes of this machine, or actors of a Ray cluster. Raises as ``RayPoolRunner`` does."""
    if settings.executor == "ray":
        from openhands_rl_plugin.hosts.pool.ray_runner import RayPoolRunner

        return RayPoolRunner(settings, options, workers=workers, storage=storage)
    return WorkerPoolRunner(settings, options, workers=workers, storage=storage)
