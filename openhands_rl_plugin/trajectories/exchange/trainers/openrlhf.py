"""OpenRLHF 0.11: the ids of one sequence, and where its answers are. Several segments are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.trainers.sequences import answers, sample_from


class ObservedTokens(TypedDict):
    """``observation_tokens``: all ids, up to the last sampled one; ``action_ranges``: start and end of each answer."""

    observation_tokens: list[int]
    action_ranges: list[tuple[int, int]]
    rollout_log_probs: list[float]


def observed_tokens(segments: Sequence[Sample]) -> ObservedTokens:
    """The only segment of an episode. Raises ``ExchangeError`` for another number of them."""
    if len(segments) != 1:
        raise ExchangeError(f"its turns are {len(segments)} sequences, and OpenRLHF takes one; use StandardReAct")
    (sample,) = segments
    return ObservedTokens(
        observation_tokens=[*sample.input_ids], action_ranges=answers(sample), rollout_log_probs=[*sample.logprobs]
    )


def sample_of_observed(row: ObservedTokens, *, temperature: float = 1.0) -> Sample:
    """The sequence of a row."""
    ids = row["observation_tokens"]
    mask = [False] * len(ids)
    for start, stop in row["action_ranges"]:
        mask[start:stop] = [True] * (stop - start)
    return sample_from(ids, mask, row["rollout_log_probs"], temperature=temperature)
