"""Episodes played in this process, without OpenHands: one environment, one strategy and one session a request."""

from __future__ import annotations

from collections.abc import Callable

from openhands_rl_plugin.protocols import Environment, LLMEngine, Strategy
from openhands_rl_plugin.session import AgentSession
from openhands_rl_plugin.types import EpisodeRequest, Limits, PolicyRef, StrategySpec, Trajectory


class SessionRunner:
    """An ``EpisodeRunner`` over ``AgentSession``. The factories are called once an episode, so nothing is shared."""

    def __init__(
        self,
        *,
        make_environment: Callable[[EpisodeRequest], Environment],
        make_strategy: Callable[[EpisodeRequest], Strategy],
        make_engine: Callable[[EpisodeRequest], LLMEngine],
        strategy_spec: StrategySpec,
        base_model: str,
        limits: Limits | None = None,
    ) -> None:
        self._make_environment = make_environment
        self._make_strategy = make_strategy
        self._make_engine = make_engine
        self._spec = strategy_spec
        self._base_model = base_model
        self._limits = limits

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Play one episode; a failed one comes back with ``failure`` set."""
        session = AgentSession(
            environment=self._make_environment(request),
            strategy=self._make_strategy(request),
            strategy_spec=self._spec,
            engine=self._make_engine(request),
            policy=PolicyRef.from_served_name(self._base_model, request.served_model or self._base_model),
            limits=self._limits,
        )
        return await session.run(request)

    async def close(self) -> None:
        """Nothing outlives an episode here."""
