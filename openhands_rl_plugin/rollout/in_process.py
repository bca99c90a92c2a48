"""Episodes played in this process, without OpenHands: one environment, one strategy and one session a request."""

from __future__ import annotations

from collections.abc import Callable

from openhands_rl_plugin.core.protocols import Environment, LLMEngine, Strategy, TrajectoryStorage
from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, PolicyRef, StopReason, StrategySpec, Trajectory
from openhands_rl_plugin.rollout.journal import stored_episode
from openhands_rl_plugin.rollout.session import AgentSession


class SessionRunner:
    """An ``EpisodeRunner`` over ``AgentSession``. The factories are called for every session, so nothing is shared.

    With a ``storage`` episodes are stored as they are played. One that is found there finished is not played again; an
    unfinished one is resumed where it stood if its environment can be brought there again, else it is restarted.
    """

    def __init__(
        self,
        *,
        make_environment: Callable[[EpisodeRequest], Environment],
        make_strategy: Callable[[EpisodeRequest], Strategy],
        make_engine: Callable[[EpisodeRequest], LLMEngine],
        strategy_spec: StrategySpec,
        base_model: str,
        limits: Limits | None = None,
        storage: TrajectoryStorage | None = None,
    ) -> None:
        self._make_environment = make_environment
        self._make_strategy = make_strategy
        self._make_engine = make_engine
        self._spec = strategy_spec
        self._base_model = base_model
        self._limits = limits
        self._storage = storage

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Play one episode; a failed one comes back with ``failure`` set. Raises ``StorageError``."""
        if self._storage is not None and (stored := await stored_episode(self._storage, trajectory_id(request))):
            if stored.stop is not StopReason.UNFINISHED:
                return stored
            if (resumed := await self._session(request).resume(request, stored)) is not None:
                return resumed
        return await self._session(request).run(request)

    async def close(self) -> None:
        """Nothing outlives an episode here."""

    def _session(self, request: EpisodeRequest) -> AgentSession:
        return AgentSession(
            environment=self._make_environment(request),
            strategy=self._make_strategy(request),
            strategy_spec=self._spec,
            engine=self._make_engine(request),
            policy=PolicyRef.from_served_name(self._base_model, request.served_model or self._base_model),
            limits=self._limits,
            storage=self._storage,
        )
