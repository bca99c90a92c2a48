"""One finished episode as a trainer needs it: the reward, and the training sequences with ids, mask and logprobs.

No trainer is imported: rows are plain values with a trainer's names for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from openhands_rl_plugin.core.types import (
    Failure,
    Frozen,
    JsonObject,
    Message,
    PolicyRef,
    Sample,
    StopReason,
    StrategySpec,
    Usage,
)
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError

TIMED_OUT = "rollout.timeout"
"""The boundary of the failure of an episode that was not over in time."""

NAMES: Mapping[str, tuple[str, str, str, str]] = {
    "TRL": ("prompt_ids", "completion_ids", "env_mask", "logprobs"),
    "SkyRL": ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs"),
    "verl": ("prompt_ids", "response_ids", "response_mask", "response_logprobs"),
}
"""Trainer -> its names for the ids before the first sampled one, for those from there on, and for the mask and the
logprobs of these."""


class PlayedRollout(Frozen):
    """One episode. With a ``failure`` it is no sample of the policy: no reward, no segments, and never one of 0.

    ``segments``: the training sequences in order, several where a prompt did not extend the one before; all of them
    have the episode's reward, and the episode counts once in a baseline, however many there are. ``off_policy``: how
    answers were sampled, where not from the policy at a temperature (empty: they may be reinforced). ``shortened``:
    what came after a secret is left out. ``cut_short``: a limit ended it. ``resolved``: the verdict of the tests of a
    repository task, or of an environment's criterion. ``seconds`` of wall time. Without ``usage`` nothing was sampled.
    """

    schema_version: Literal[1] = 1
    trajectory_id: str
    run_id: str
    group_id: str
    task_id: str
    environment: str
    strategy: StrategySpec
    policy: PolicyRef
    reward: float | None = None
    reward_version: str = ""
    resolved: bool | None = None
    stop: StopReason
    cut_short: bool = False
    failure: Failure | None = None
    segments: tuple[Sample, ...] = ()
    off_policy: str = ""
    shortened: bool = False
    messages: tuple[Message, ...] = ()
    tools: tuple[JsonObject, ...] = ()
    turns: int = 0
    usage: Usage = Usage()
    seconds: float = 0.0


def outcome(rollout: PlayedRollout) -> float:
    """The reward of an episode that can be trained on. Raises ``ExchangeError`` for another one: it is never 0."""
    if rollout.failure is None and rollout.reward is not None and rollout.segments:
        return rollout.reward
    why = rollout.failure.message if rollout.failure is not None else "it has no reward or no token ids"
    raise ExchangeError(f"{rollout.task_id}: no episode to train on ({why}): roll it out again")


def segments(samples: Sequence[Sample], trainer: str, *, temperature: float = 1.0) -> list[JsonObject]:
    """A row for each training sequence, with the ``NAMES`` of a trainer. Raises ``ExchangeError``."""
    rows: list[JsonObject] = []
    for each in samples:
        sample = checked(each, trainer, temperature=temperature)
        start = sample.mask.index(True)
        ids, mask, logprobs = sample.input_ids, map(int, sample.mask[start:]), sample.logprobs[start:]
        values: list[Any] = [[*ids[:start]], [*ids[start:]], [*mask], [*logprobs]]
        rows.append(dict(zip(NAMES[trainer], values, strict=True)))
    return rows


def checked(sample: Sample, trainer: str, *, temperature: float = 1.0) -> Sample:
    """``sample``, if the format can carry it.

    Raises ``ExchangeError`` for what would be trained wrongly without a word: an answer at another temperature than
    the trainer divides the logits by, equal samples counted as one, a first token that nothing comes before.
    """
    where = f"trajectory {sample.trajectory_id}"
    if not len(sample.input_ids) == len(sample.mask) == len(sample.logprobs):
        raise ExchangeError(f"{where}: ids, mask and logprobs have different lengths")
    if not any(sample.mask):
        raise ExchangeError(f"{where}: nothing in it was sampled")
    if sample.mask[0]:
        raise ExchangeError(f"{where}: it begins with a sampled token, which has no prompt")
    sampled = {sample.temperature_at(at) for at, own in enumerate(sample.mask) if own}
    if sampled != {temperature}:
        found = ", ".join(f"{each:g}" for each in sorted(sampled))
        raise ExchangeError(f"{where}: sampled at temperature {found}, and {trainer} trains at {temperature:g}")
    if sample.count != 1:
        raise ExchangeError(f"{where}: it stands for {sample.count} equal samples: repeat it, with a count of 1")
    if sample.token_advantages:
        raise ExchangeError(f"{where}: {trainer} takes one advantage for a sequence, and this has one for each token")
    return sample


def answers(sample: Sample) -> list[tuple[int, int]]:
    """Start and end of each completion. Raises ``ExchangeError`` for a sequence without ``spans``."""
    if not sample.spans:
        raise ExchangeError(f"trajectory {sample.trajectory_id}: it does not say where its completions are")
    return [(start, stop) for _, start, stop in sample.spans]


def observed_tokens(samples: Sequence[Sample]) -> dict[str, Any]:
    """The only sequence of an episode for OpenRLHF 0.11. Raises ``ExchangeError`` for another number of them.

    ``observation_tokens``: all ids, up to the last sampled one; ``action_ranges``: start and end of each completion.
    """
    if len(samples) != 1:
        raise ExchangeError(f"its turns are {len(samples)} sequences, and OpenRLHF takes one; use StandardReAct")
    (sample,) = samples
    ids = {"observation_tokens": [*sample.input_ids], "action_ranges": answers(sample)}
    return {**ids, "rollout_log_probs": [*sample.logprobs]}
