"""OpenEnv's ``TrainingTrace``, which TRL's ``HarnessRolloutWorker`` asks a session for: a ``TrainingTurn`` an answer.

``TrainingTrace(turns=[TrainingTurn(**row) for row in rows])``. A turn has its whole prompt; TRL joins turns that extend
each other. What is not carried: advantages, the reward (the session's ``verify`` says it), the temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from openhands_rl_plugin.core.types import JsonObject, Sample
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.trainers.sequences import answers, checked, sample_from

_ROUNDING = 1e-4
"""A logprob above 0 by no more than this, in nats, is 0 that an engine rounded; OpenEnv refuses any above 0."""


class TrainingTurnRow(TypedDict):
    """The fields of a ``TrainingTurn``; ``loss_mask`` is as long as prompt and answer."""

    node_id: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    metadata: JsonObject


def training_turns(segments: Sequence[Sample], *, temperature: float = 1.0) -> list[TrainingTurnRow]:
    """The turns of one episode, in order. Raises ``ExchangeError``."""
    turns: list[TrainingTurnRow] = []
    for number, segment in enumerate(segments):
        sample = checked(segment, "OpenEnv", temperature=temperature)
        for start, stop in answers(sample):
            logprobs = [_negative(each, sample.trajectory_id) for each in sample.logprobs[start:stop]]
            turns.append(
                TrainingTurnRow(
                    node_id=f"{sample.trajectory_id}/{len(turns)}",
                    prompt_token_ids=[*sample.input_ids[:start]],
                    completion_token_ids=[*sample.input_ids[start:stop]],
                    per_token_logps=logprobs,
                    loss_mask=[0] * start + [1] * (stop - start),
                    metadata={"segment": number},
                )
            )
    return turns


def _negative(logprob: float, where: str) -> float:
    if logprob > _ROUNDING:
        raise ExchangeError(f"trajectory {where}: a logprob of {logprob:g} is above 0; check the model server")
    return min(logprob, 0.0)


def samples_of_turns(turns: Sequence[TrainingTurnRow], *, temperature: float = 1.0) -> list[Sample]:
    """The sequences of turns: those whose prompt is what was there before, and more, are one."""
    found: list[tuple[list[int], list[int], list[float]]] = []
    for turn in turns:
        prompt, answer = turn["prompt_token_ids"], turn["completion_token_ids"]
        held = found[-1] if found else None
        if held is None or prompt[: len(held[0])] != held[0]:
            held = ([], [], [])
            found.append(held)
        new = prompt[len(held[0]) :]
        held[0].extend((*new, *answer))
        held[1].extend((*[0] * len(new), *[1] * len(answer)))
        held[2].extend((*[0.0] * len(new), *turn["per_token_logps"]))
    names = [turn["node_id"].rpartition("/")[0] for turn in turns][:1] or [""]
    return [sample_from(*each, trajectory_id=names[0], temperature=temperature) for each in found]
