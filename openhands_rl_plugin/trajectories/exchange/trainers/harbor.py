"""Harbor's ``AgentContext.rollout_details``: one entry a segment, with the whole prompt and the answer of each turn.

What is not carried: the reward, which Harbor's verifier gives, advantages, and the temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.trajectories.exchange.trainers.sequences import answers, checked, sample_from


class RolloutDetailRow(TypedDict):
    """Harbor's ``RolloutDetail``: an item of each list is a turn."""

    prompt_token_ids: list[list[int]]
    completion_token_ids: list[list[int]]
    logprobs: list[list[float]]


def rollout_details(segments: Sequence[Sample], *, temperature: float = 1.0) -> list[RolloutDetailRow]:
    """The details of one episode, the main conversation first. Raises ``ExchangeError``."""
    details: list[RolloutDetailRow] = []
    for segment in segments:
        sample = checked(segment, "Harbor", temperature=temperature)
        turns = answers(sample)
        details.append(
            RolloutDetailRow(
                prompt_token_ids=[[*sample.input_ids[:start]] for start, _ in turns],
                completion_token_ids=[[*sample.input_ids[start:stop]] for start, stop in turns],
                logprobs=[[*sample.logprobs[start:stop]] for start, stop in turns],
            )
        )
    return details


def samples_of_details(details: Sequence[RolloutDetailRow], *, temperature: float = 1.0) -> list[Sample]:
    """The sequences of details. Raises ``ValueError`` for a turn whose prompt does not begin with the turns before."""
    return [_sample(each, temperature) for each in details]


def _sample(detail: RolloutDetailRow, temperature: float) -> Sample:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    turns = zip(detail["prompt_token_ids"], detail["completion_token_ids"], detail["logprobs"], strict=True)
    for number, (prompt, answer, said) in enumerate(turns):
        if prompt[: len(ids)] != ids:
            raise ValueError(f"turn {number}: its prompt does not extend the turn before")
        new = len(prompt) - len(ids)
        ids = [*prompt, *answer]
        mask += [0] * new + [1] * len(answer)
        logprobs += [0.0] * new + said
    return sample_from(ids, mask, logprobs, temperature=temperature)
