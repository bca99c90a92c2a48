"""TRL 1.16: rows for ``AsyncGRPOTrainer``'s queue, and columns for ``GRPOTrainer(rollout_func=)``.

A ``RolloutSample`` has numpy arrays where a row here has lists:
``RolloutSample(**{**row, **{name: numpy.asarray(row[name], dtype) for name, dtype in ARRAYS.items()}})``.
What is not carried: the trajectory's name, the base model, the places of answers, and the temperature, which is
``args.temperature`` for all; an advantage for each token is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from openhands_rl_plugin.core.types import JsonObject, PolicyRef, Sample
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout
from openhands_rl_plugin.trajectories.exchange.trainers.sequences import (
    checked,
    one_advantage,
    outcome,
    prompt_length,
    sample_from,
    version_of,
)

ARRAYS = {"input_ids": "int64", "completion_mask": "int64", "old_log_probs": "float32"}
_ADAPTER = "trl-policy"


class QueuedRow(TypedDict):
    """The fields of a ``RolloutSample``; ``completion``: the messages from the policy's first one on."""

    prompt: list[JsonObject]
    completion: list[JsonObject]
    input_ids: list[int]
    completion_mask: list[int]
    old_log_probs: list[float]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]


class GeneratedColumns(TypedDict):
    """What a ``rollout_func`` returns: a list a column, an entry an episode. ``env_mask`` is 1 where it is trained."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]]
    rollout_reward: list[float]


def queued_rows(
    segments: Sequence[Sample],
    *,
    group_id: int,
    model_version: int | None = None,
    messages: Sequence[JsonObject] = (),
    metrics: Mapping[str, float] | None = None,
    temperature: float = 1.0,
) -> list[QueuedRow]:
    """The rows of one episode: all with the episode's advantage, and a ``group_id`` of their own for each episode,
    by which TRL counts conversations, not rows.

    ``model_version``: by default that of the policy. ``messages`` are for TRL's logs only. Raises ``ExchangeError``.
    """
    rows = [checked(each, "TRL", temperature=temperature) for each in segments]
    advantage = one_advantage(rows) if rows else 0.0
    said = next((at for at, each in enumerate(messages) if each.get("role") == "assistant"), len(messages))
    return [
        QueuedRow(
            prompt=[*messages[:said]],
            completion=[*messages[said:]],
            input_ids=[*each.input_ids],
            completion_mask=[*map(int, each.mask)],
            old_log_probs=[*each.logprobs],
            advantage=advantage,
            model_version=version_of(each.policy) if model_version is None else model_version,
            group_id=group_id,
            metrics=dict(metrics or {}),
        )
        for each in rows
    ]


def samples_of_queued(rows: Sequence[QueuedRow], base_model: str, *, temperature: float = 1.0) -> list[Sample]:
    """The sequences of rows. A version above 0 is one of TRL's adapter."""
    return [
        sample_from(
            row["input_ids"],
            row["completion_mask"],
            row["old_log_probs"],
            advantage=row["advantage"],
            policy=PolicyRef(base_model=base_model, adapter=_ADAPTER, version=row["model_version"])
            if row["model_version"]
            else PolicyRef(base_model=base_model),
            temperature=temperature,
        )
        for row in rows
    ]


def generated_columns(rollouts: Sequence[PlayedRollout], *, temperature: float = 1.0) -> GeneratedColumns:
    """The columns for ``rollout_func``, in the order of ``rollouts``; a reward function returns ``rollout_reward``.

    It takes one sequence an episode, and one for each prompt. Raises ``ExchangeError`` for a failed episode, which has
    to be played again, and for one of several segments, which only AsyncGRPO can train on.
    """
    columns = GeneratedColumns(prompt_ids=[], completion_ids=[], logprobs=[], env_mask=[], rollout_reward=[])
    for played in rollouts:
        reward = outcome(played)
        if len(played.segments) != 1:
            raise ExchangeError(
                f"{played.task_id}: it has {len(played.segments)} segments, and a rollout_func takes one sequence an "
                "episode: play without condensation, or use AsyncGRPOTrainer"
            )
        sample = checked(played.segments[0], "TRL", temperature=temperature)
        start = prompt_length(sample)
        columns["prompt_ids"].append([*sample.input_ids[:start]])
        columns["completion_ids"].append([*sample.input_ids[start:]])
        columns["logprobs"].append([*sample.logprobs[start:]])
        columns["env_mask"].append([*map(int, sample.mask[start:])])
        columns["rollout_reward"].append(reward)
    return columns
