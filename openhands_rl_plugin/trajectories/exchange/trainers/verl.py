"""verl 0.9: ``AgentLoopOutput(**row)``, one for each segment.

``AgentLoopBase.run`` returns the only one, or with the V1 trainer the whole list, of which the last one's reward is
copied to all. What is not carried: advantages (verl has its own), the temperature (one for all), the places of answers.
The policy's version is ``extra_fields.min_global_steps`` and ``max_global_steps``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from openhands_rl_plugin.core.types import JsonObject, Sample
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout
from openhands_rl_plugin.trajectories.exchange.trainers.sequences import (
    checked,
    outcome,
    prompt_length,
    sample_from,
    version_of,
)


class AgentLoopRow(TypedDict):
    """The fields of an ``AgentLoopOutput``; ``metrics`` are in seconds."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    reward_score: float
    num_turns: int
    metrics: dict[str, float]
    extra_fields: JsonObject


def agent_loop_rows(
    played: PlayedRollout, *, longest_prompt: int, longest_response: int, temperature: float = 1.0
) -> list[AgentLoopRow]:
    """The rows of one episode; the limits are ``data.max_prompt_length`` and ``data.max_response_length``, in tokens.

    Raises ``ExchangeError`` for a failed episode (raise it on: verl then drops the whole prompt), and for a row that
    verl would cut without a word.
    """
    reward = outcome(played)
    rows: list[AgentLoopRow] = []
    for segment in played.segments:
        sample = checked(segment, "verl", temperature=temperature)
        start = prompt_length(sample)
        for size, limit, name in (
            (start, longest_prompt, "data.max_prompt_length"),
            (len(sample.input_ids) - start, longest_response, "data.max_response_length"),
        ):
            if size > limit:
                raise ExchangeError(f"{played.task_id}: {size} tokens are more than {name} = {limit}; raise it")
        version = version_of(sample.policy)
        rows.append(
            AgentLoopRow(
                prompt_ids=[*sample.input_ids[:start]],
                response_ids=[*sample.input_ids[start:]],
                response_mask=[*map(int, sample.mask[start:])],
                response_logprobs=[*sample.logprobs[start:]],
                reward_score=reward,
                num_turns=2 * played.turns,
                metrics={"generate_sequences": played.seconds},
                extra_fields={"min_global_steps": version, "max_global_steps": version},
            )
        )
    return rows


def samples_of_agent_loop(rows: Sequence[AgentLoopRow], *, temperature: float = 1.0) -> list[Sample]:
    """The sequences of the rows."""
    return [
        sample_from(
            (*row["prompt_ids"], *row["response_ids"]),
            (*[0] * len(row["prompt_ids"]), *row["response_mask"]),
            (*[0.0] * len(row["prompt_ids"]), *row["response_logprobs"]),
            temperature=temperature,
        )
        for row in rows
    ]
