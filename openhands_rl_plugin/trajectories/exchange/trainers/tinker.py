"""Tinker's ``Datum``, as its service, SkyRL's server and open-rl take it.

``Datum(model_input=ModelInput.from_ints(row["model_input"]), loss_fn_inputs=row["loss_fn_inputs"])``: of T ids every
array is T - 1 long and shifted by one. What is not carried: the names of trajectory and policy, and the places of
answers (``spans``); one temperature holds for the whole batch. Without ``weights`` a token of advantage 0 cannot be
told from one that was not sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.trainers.sequences import checked, sample_from


class DatumRow(TypedDict):
    """A ``Datum``; ``loss_fn_inputs`` has target_tokens, logprobs, advantages, and weights where they are wanted."""

    model_input: list[int]
    loss_fn_inputs: dict[str, list[int] | list[float]]


def datums(
    samples: Iterable[Sample], *, scale: float = 1.0, weights: bool = False, temperature: float = 1.0
) -> list[DatumRow]:
    """One row for each segment, with the advantage times ``scale``.

    The service and SkyRL's torch trainer add up the tokens' losses, so that a mean over tokens is a ``scale`` of one
    over the number of sampled tokens in the batch. SkyRL's JAX back end needs ``weights``, and divides by them itself.
    Raises ``ExchangeError``.
    """
    rows = [checked(each, "Tinker", temperature=temperature, own_advantages=True) for each in samples]
    return [_row(each, scale, weights) for each in rows]


def _row(sample: Sample, scale: float, weights: bool) -> DatumRow:
    own = range(1, len(sample.input_ids))
    inputs: dict[str, list[int] | list[float]] = {
        "target_tokens": [*sample.input_ids[1:]],
        "logprobs": [*sample.logprobs[1:]],
        "advantages": [sample.advantage_at(at) * scale if sample.mask[at] else 0.0 for at in own],
    }
    if weights:
        inputs["weights"] = [float(sample.mask[at]) for at in own]
    return DatumRow(model_input=[*sample.input_ids[:-1]], loss_fn_inputs=inputs)


def samples_of_datums(rows: Iterable[DatumRow], *, temperature: float = 1.0) -> list[Sample]:
    """The sequences of rows with ``weights``. Raises ``ExchangeError`` for one without, whose mask is not known."""
    return [_sample(row, temperature) for row in rows]


def _sample(row: DatumRow, temperature: float) -> Sample:
    inputs = row["loss_fn_inputs"]
    if "weights" not in inputs:
        raise ExchangeError("a datum without weights does not say what was sampled")
    ids = [*row["model_input"][:1], *map(int, inputs["target_tokens"])]
    advantages, mask = [0.0, *inputs["advantages"]], [False, *map(bool, inputs["weights"])]
    found = {value for value, own in zip(advantages, mask, strict=True) if own}
    one = found.pop() if len(found) == 1 else None
    return sample_from(
        ids,
        mask,
        [0.0, *inputs["logprobs"]],
        advantage=1.0 if one is None else one,
        token_advantages=advantages if one is None else (),
        temperature=temperature,
    )
