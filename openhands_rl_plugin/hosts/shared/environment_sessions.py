"""Episodes of environments, for a host whose agents work in workspaces only: sessions of the project's own."""

from __future__ import annotations

import asyncio

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import make_environment
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.types import EpisodeRequest, PolicyRef, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.episode import overlay
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions
from openhands_rl_plugin.hosts.shared.session_runner import require_server
from openhands_rl_plugin.models.engines.seeded import SeededEngine
from openhands_rl_plugin.models.engines.served import ServedEngines
from openhands_rl_plugin.rollout.journal import EpisodeSink
from openhands_rl_plugin.rollout.session import AgentSession


class EnvironmentSessions:
    """An ``EpisodeRunner`` over ``AgentSession`` and the server of ``[rl.serving]``. Imports no OpenHands.

    With a ``storage`` episodes are stored while they run. Raises ``ConfigError`` when there is no server or model, the
    strategy cannot be created, or another agent than ``RLAgent`` is asked for.
    """

    def __init__(
        self, settings: RLSettings, options: HostOptions | None = None, *, storage: EpisodeSink | None = None
    ) -> None:
        require_server(settings)
        self._settings = settings
        self._options = options or HostOptions()
        if self._options.agent != RL_AGENT:
            raise ConfigError(f"{self._options.agent} works in workspaces only; environment mode needs {RL_AGENT}")
        self._storage = storage
        self._spec = self._options.strategy_spec(settings)
        self._make_strategy()
        self._gate = asyncio.Semaphore(self._options.sessions or settings.max_workers)
        self._engines = ServedEngines(settings, token_ids=self._options.token_ids)

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        settings, base_model = self._settings, self._settings.serving.model
        served = request.served_model or base_model
        sampling = overlay(settings.sampling_params(), request.sampling)
        async with self._gate:
            session = AgentSession(
                environment=make_environment(settings),
                strategy=self._make_strategy(),
                strategy_spec=self._spec,
                engine=SeededEngine(self._engines(served), sampling, request.seed),
                policy=PolicyRef.from_served_name(base_model, served),
                limits=settings.limits(),
                storage=self._storage,
            )
            return await session.run(request)

    async def close(self) -> None:
        """Close the connections to the model server."""
        await self._engines.close()

    def _make_strategy(self) -> Strategy:
        return registry.build("strategies", self._spec.name, self._spec.options)
