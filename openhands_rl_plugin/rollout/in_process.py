"""Episodes run in this process, without OpenHands: one environment, one strategy and one session a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import Environment, LLMEngine, Strategy, TrajectoryStorage
from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    JsonObject,
    Limits,
    Message,
    PolicyRef,
    SamplingParams,
    StopReason,
    StrategySpec,
    Trajectory,
)
from openhands_rl_plugin.rollout.journal import stored_episode
from openhands_rl_plugin.rollout.session import AgentSession

_REPLAYS = 2
"""An environment that answered otherwise once may have been disturbed; twice, the episode restarts."""


class NoEngine:
    """The engine of strategies that sample nothing, such as a script."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Raises ``ConfigError``: a strategy that samples needs an engine."""
        raise ConfigError("the strategy samples completions, but its runner was made without an engine")


class SessionRunner:
    """An ``EpisodeRunner`` over ``AgentSession``. The factories are called once per session, so nothing is shared.

    ``make_engine`` may be left out for a strategy that samples nothing. With a ``storage``, episodes are stored while
    they run. A finished episode that is found there is not repeated; an unfinished one is resumed if its
    environment can be brought back to the same state, else it restarts.
    """

    def __init__(
        self,
        *,
        make_environment: Callable[[EpisodeRequest], Environment],
        make_strategy: Callable[[EpisodeRequest], Strategy],
        make_engine: Callable[[EpisodeRequest], LLMEngine] | None = None,
        strategy_spec: StrategySpec,
        base_model: str,
        limits: Limits | None = None,
        storage: TrajectoryStorage | None = None,
    ) -> None:
        self._make_environment = make_environment
        self._make_strategy = make_strategy
        self._make_engine = make_engine or (lambda request: NoEngine())
        self._spec = strategy_spec
        self._base_model = base_model
        self._limits = limits
        self._storage = storage

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run one episode; a failed one comes back with ``failure`` set. Raises ``StorageError``."""
        if self._storage is not None and (stored := await stored_episode(self._storage, trajectory_id(request))):
            if stored.stop is not StopReason.UNFINISHED:
                return stored
            for _ in range(_REPLAYS):
                if (resumed := await self._session(request).resume(request, stored)) is not None:
                    return resumed
        return await self._session(request).run(request)

    async def close(self) -> None:
        """Does nothing: no resource outlives an episode."""

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
