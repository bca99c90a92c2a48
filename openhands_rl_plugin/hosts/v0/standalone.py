"""An episode that nobody drives, as under ``python -m openhands.core.main``: made from ``[rl]`` and stored once."""

from __future__ import annotations

import asyncio
import atexit
import threading
import uuid
import zlib

from openhands_rl_plugin import registry
from openhands_rl_plugin.hosts.v0.background import background
from openhands_rl_plugin.hosts.v0.episode import ControllerEpisode
from openhands_rl_plugin.protocols import TrajectoryStorage
from openhands_rl_plugin.settings import RLSettings
from openhands_rl_plugin.types import EpisodeRequest, Failure, StopReason, StrategySpec, Task, Trajectory

WORKSPACE = "workspace"


def standalone_episode(
    settings: RLSettings, *, session: str, instruction: str, base_model: str, environment_mode: bool
) -> ControllerEpisode:
    """The episode of an OpenHands session. Raises ``ConfigError`` for a strategy that cannot be loaded."""
    run_id = f"standalone-{uuid.uuid4().hex}"
    request = EpisodeRequest(
        task=Task(
            id=session, environment=settings.env_name if environment_mode else WORKSPACE, instruction=instruction
        ),
        run_id=run_id,
        group_id=session,
        # Runs differ from each other unless the same seed is wanted for the same run.
        seed=zlib.crc32(f"{settings.sampling.seed}/{run_id}".encode()),
    )
    return ControllerEpisode(
        request,
        settings,
        strategy=registry.build("strategies", settings.rollout_strategy),
        strategy_spec=StrategySpec(name=settings.rollout_strategy),
        base_model=base_model,
        environment_mode=environment_mode,
    )


class StandaloneKeeper:
    """Stores an episode when it ends, once; when the process ends first, what there is of it."""

    def __init__(self, episode: ControllerEpisode) -> None:
        self._episode = episode
        self._kept = False
        self._lock = threading.Lock()
        atexit.register(self._keep_at_exit)

    def keep(self, stop: StopReason | None = None, failure: Failure | None = None) -> None:
        """Store the episode; later calls do nothing. Raises ``StorageError``."""
        if self._claim():
            background().wait_for(self._store(self._episode.freeze(stop=stop, failure=failure)))

    def _keep_at_exit(self) -> None:
        # The interpreter starts no threads any more, so the storage is neither reached through one nor closed.
        if self._episode.tree.nodes and self._claim():
            asyncio.run(self._storage().add(self._episode.freeze()))

    def _claim(self) -> bool:
        with self._lock:
            kept, self._kept = self._kept, True
        atexit.unregister(self._keep_at_exit)
        return not kept

    async def _store(self, trajectory: Trajectory) -> None:
        storage = self._storage()
        try:
            await storage.add(trajectory)
        finally:
            await storage.close()

    def _storage(self) -> TrajectoryStorage:
        settings = self._episode.settings
        options = {"path": str(settings.storage.directory), "durable": settings.storage.durable}
        return registry.build("storages", settings.storage_backend, options)
