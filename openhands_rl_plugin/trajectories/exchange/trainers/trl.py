"""TRL: columns for ``GRPOTrainer(rollout_func=)``.

What is not carried: the trajectory's name, the base model, the places of answers, and the temperature, which is
``args.temperature`` for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout
from openhands_rl_plugin.trajectories.exchange.trainers.sequences import (
    checked,
    outcome,
    prompt_length,
)


class GeneratedColumns(TypedDict):
    """What a ``rollout_func`` returns: a list a column, an entry an episode. ``env_mask`` is 1 where it is trained."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]]
    rollout_reward: list[float]


def generated_columns(rollouts: Sequence[PlayedRollout], *, temperature: float = 1.0) -> GeneratedColumns:
    """The columns for ``rollout_func``, in the order of ``rollouts``; a reward function returns ``rollout_reward``.

    It takes one sequence an episode, and one for each prompt. Raises ``ExchangeError`` for a failed episode, which has
    to be played again, and for one of several segments.
    """
    columns = GeneratedColumns(prompt_ids=[], completion_ids=[], logprobs=[], env_mask=[], rollout_reward=[])
    for played in rollouts:
        reward = outcome(played)
        if len(played.segments) != 1:
            raise ExchangeError(
                f"{played.task_id}: it has {len(played.segments)} segments, and a rollout_func takes one sequence an "
                "episode: play without condensation"
            )
        sample = checked(played.segments[0], "TRL", temperature=temperature)
        start = prompt_length(sample)
        columns["prompt_ids"].append([*sample.input_ids[:start]])
        columns["completion_ids"].append([*sample.input_ids[start:]])
        columns["logprobs"].append([*sample.logprobs[start:]])
        columns["env_mask"].append([*map(int, sample.mask[start:])])
        columns["rollout_reward"].append(reward)
    return columns
