"""What all formats of trainers ask of a training sequence, and where its answers are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from openhands_rl_plugin.core.types import PolicyRef, Sample
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout


def checked(sample: Sample, trainer: str, *, temperature: float = 1.0, own_advantages: bool = False) -> Sample:
    """``sample``, if the format can carry it. ``own_advantages``: it has one for each token.

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
    if sample.token_advantages and not own_advantages:
        raise ExchangeError(f"{where}: {trainer} takes one advantage for a sequence, and this has one for each token")
    if not all(map(math.isfinite, sample.logprobs)):
        raise ExchangeError(f"{where}: a logprob is not finite")
    return sample


def outcome(played: PlayedRollout) -> float:
    """The reward of an episode that can be trained on. Raises ``ExchangeError`` for another one: it is never 0."""
    if played.failure is None and played.reward is not None and played.segments:
        return played.reward
    why = played.failure.message if played.failure is not None else "it has no reward or no token ids"
    raise ExchangeError(f"{played.task_id}: no episode to train on ({why}): play it again")


def prompt_length(sample: Sample) -> int:
    """The number of ids before the first sampled one."""
    return sample.mask.index(True)


def answers(sample: Sample) -> list[tuple[int, int]]:
    """Start and end of each answer; without ``spans``, answers that follow each other directly are one."""
    if sample.spans:
        return [(start, stop) for _, start, stop in sample.spans]
    runs: list[tuple[int, int]] = []
    for own, run in groupby(enumerate(sample.mask), key=lambda each: each[1]):
        places = [at for at, _ in run]
        if own:
            runs.append((places[0], places[-1] + 1))
    return runs


def version_of(policy: PolicyRef | None) -> int:
    """The version of an adapter; 0 for a base model."""
    return 0 if policy is None or policy.version is None else policy.version


def sample_from(
    ids: Iterable[int],
    mask: Iterable[object],
    logprobs: Iterable[float],
    *,
    trajectory_id: str = "",
    advantage: float = 1.0,
    token_advantages: Sequence[float] = (),
    policy: PolicyRef | None = None,
    temperature: float = 1.0,
) -> Sample:
    """A sequence that came back from a format. It has no node of a stored tree, so its ``leaf`` is 0."""
    own = tuple(map(bool, mask))
    return Sample(
        trajectory_id=trajectory_id,
        leaf=0,
        input_ids=tuple(ids),
        mask=own,
        logprobs=tuple(value if at else 0.0 for at, value in zip(own, logprobs, strict=True)),
        advantage=advantage,
        token_advantages=tuple(token_advantages),
        policy=policy,
        temperature=temperature,
    )
