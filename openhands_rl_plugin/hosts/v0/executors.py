"""Where OpenHands episodes are played: ``[rl] executor``."""

from __future__ import annotations

from openhands_rl_plugin.hosts.v0.driver import ControllerOptions
from openhands_rl_plugin.hosts.v0.workers import WorkerPoolRunner
from openhands_rl_plugin.protocols import TrajectoryStorage
from openhands_rl_plugin.settings import RLSettings


def open_pool(
    settings: RLSettings,
    options: ControllerOptions | None = None,
    *,
    workers: int = 2,
    storage: TrajectoryStorage | None = None,
) -> WorkerPoolRunner:
    """``workers`` processes of this machine, or actors of a Ray cluster. Raises as ``RayPoolRunner`` does."""
    if settings.executor == "ray":
        from openhands_rl_plugin.hosts.v0.ray_workers import RayPoolRunner

        return RayPoolRunner(settings, options, workers=workers, storage=storage)
    return WorkerPoolRunner(settings, options, workers=workers, storage=storage)
