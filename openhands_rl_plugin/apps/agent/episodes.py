"""The episodes behind ``RLAgent.run``: built from the settings, and returned in the caller's form."""

from __future__ import annotations

import random
from typing import Literal, TypedDict

from openhands_rl_plugin.config.build import make_environment, make_strategy, strategy_spec
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.messages import transcript_nodes
from openhands_rl_plugin.core.protocols import LLMEngine, TrajectoryStorage
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, Limits, Score, Trajectory
from openhands_rl_plugin.models.engines.seeded import SeededEngine
from openhands_rl_plugin.rollout.session import SessionRunner

# The range of an episode's seed: far larger than the number of completions of a call, whose seeds are consecutive.
_SEEDS = 2**31

ConversationMessage = TypedDict(
    "ConversationMessage", {"from": Literal["human", "gpt"], "value": str, "loss": bool | None}
)
"""A message in AgentGym's form; ``loss`` is true for sampled messages and ``None`` for all others."""


class EpisodeResult(TypedDict):
    """One episode of ``RLAgent.run``.

    ``reward`` is that of ``[rl.reward]`` (default: the return), or ``None`` when there is no valid one; then
    ``failure`` says why. ``text`` is the whole conversation. ``trajectory_id`` is its id in the storage.
    """

    conversation: list[ConversationMessage]
    reward: float | None
    text: str
    trajectory_id: str
    task_id: str
    stop: str
    failure: str | None


def session_runner(
    settings: RLSettings,
    engine: LLMEngine,
    *,
    base_model: str,
    limits: Limits,
    seed: str,
    storage: TrajectoryStorage | None = None,
) -> SessionRunner:
    """A runner for the episodes of one run over one engine, each with its own environment, strategy and seed.

    With a ``storage``, episodes are stored while they run.
    """

    def engine_for(request: EpisodeRequest) -> SeededEngine:
        # Not the request's own seed: that one depends on the run's id, which differs in every run.
        key = f"{seed}/{request.task.id}/{request.sample}/{request.attempt}"
        return SeededEngine(engine, settings.sampling_params(), random.Random(key).randrange(_SEEDS))

    return SessionRunner(
        make_environment=lambda request: make_environment(settings),
        make_strategy=lambda request: make_strategy(settings),
        make_engine=engine_for,
        strategy_spec=strategy_spec(settings),
        base_model=base_model,
        limits=limits,
        storage=storage,
    )


def result_of(trajectory: Trajectory, outcome: Score | Failure) -> EpisodeResult:
    """An episode and its score in the caller's form."""
    conversation = [_message(trajectory, index) for index in transcript_nodes(trajectory)]
    speakers = {"human": "Human", "gpt": "Assistant"}
    return EpisodeResult(
        conversation=conversation,
        reward=outcome.reward if isinstance(outcome, Score) else None,
        text="".join(f"\n{speakers[message['from']]}: {message['value']}" for message in conversation),
        trajectory_id=trajectory.id,
        task_id=trajectory.task.id,
        stop=trajectory.stop.value,
        failure=f"{outcome.kind.value}: {outcome.message}" if isinstance(outcome, Failure) else None,
    )


def _message(trajectory: Trajectory, index: int) -> ConversationMessage:
    node = trajectory.nodes[index]
    speaker = "gpt" if node.message.role == "assistant" else "human"
    loss = node.sampled if speaker == "gpt" else None
    return {"from": speaker, "value": node.message.content or "", "loss": loss}
