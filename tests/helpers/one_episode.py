"""One episode of an environment, by ``AgentSession``, mostly with completions from a script."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.protocols import Environment, LLMEngine, Strategy
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    FailureKind,
    Limits,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout.episode import AgentSession
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.testing import ScriptedEngine


async def one_episode(
    environment: Environment,
    engine: LLMEngine | Sequence[str],
    task: Task,
    *,
    limits: Limits | None = None,
    strategy: Strategy | None = None,
) -> Trajectory:
    session = AgentSession(
        environment=environment,
        strategy=strategy or StandardReActStrategy(),
        strategy_spec=StrategySpec(name="StandardReAct"),
        engine=ScriptedEngine(engine) if isinstance(engine, Sequence) else engine,
        policy=PolicyRef(base_model="scripted"),
        limits=limits,
    )
    return await session.run(EpisodeRequest(task=task, run_id="r", group_id="g"))


async def assert_failed(trajectory: Trajectory, kind: FailureKind, *words: str) -> None:
    """It has a failure of that kind, in one line with these words, and no reward."""
    assert trajectory.stop is StopReason.ERROR and trajectory.failure is not None
    assert trajectory.failure.kind is kind, trajectory.failure
    assert [word for word in words if word not in trajectory.failure.message] == [], trajectory.failure.message
    assert "\n" not in trajectory.failure.message
    with pytest.raises(GraderError):
        await ReturnReward()(trajectory)
