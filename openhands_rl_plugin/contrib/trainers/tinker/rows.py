"""Training samples as rows of the Tinker API, so that the server's reduction gives the gradient of the whole batch.

Services add up the losses of all tokens (SkyRL: ``ppo_utils.py``). SkyRL's JAX back end divides those of a sequence by
the sum of its weights, and the gradient by the number of sequences since the last step (``backends/jax.py``): there a
token's weight is multiplied by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from openhands_rl_plugin.training.losses.micro_batches import TrainingSample
from openhands_rl_plugin.trajectories.exchange.trainers.tinker import DatumRow, datums

Reduction = Literal["sum", "sequence-mean"]

_ONE: Mapping[str, float] = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}


def policy_rows(items: Sequence[TrainingSample], factors: Sequence[Tensor], reduction: Reduction) -> list[DatumRow]:
    """Rows for a policy gradient. ``factors``: [K] of each sample, advantages with all weights in them.

    The ratio is to ``TrainingSample.old``. Raises ``ExchangeError`` for samples that are not of temperature 1.
    """
    averaged = reduction == "sequence-mean"
    made = []
    for item, each in zip(items, factors, strict=True):
        scale = len(item.positions) * len(items) if averaged else 1
        changed = {
            "logprobs": _spread(item, item.old),
            "token_advantages": _spread(item, each * scale),
            "token_temperatures": _spread(
                item, torch.ones_like(each) if item.temperatures is None else item.temperatures
            ),
            "count": 1,  # the factors have it
        }
        made.append(item.sample.model_copy(update=changed))
    return datums(made, weights=averaged)


def likelihood_rows(
    items: Sequence[TrainingSample], factors: Sequence[Tensor], reduction: Reduction
) -> tuple[list[DatumRow], str, Mapping[str, float]]:
    """Rows, loss and its options with the gradient of ``-sum(factor * logprob)``; factors ([K]) of any sign.

    Where weights are divided by their own sum they cannot carry factors: there it is CISPO with a ratio clipped to 1.
    """
    rows = policy_rows(items, factors, reduction)
    if reduction == "sequence-mean":
        return rows, "cispo", _ONE
    for row in rows:
        inputs = row["loss_fn_inputs"]
        row["loss_fn_inputs"] = {"target_tokens": inputs["target_tokens"], "weights": inputs["advantages"]}
    return rows, "cross_entropy", {}


def forward_rows(sequences: Sequence[Sequence[int]]) -> list[DatumRow]:
    """Rows of which only the logprobs are wanted."""
    return [
        DatumRow(
            model_input=[*ids[:-1]],
            loss_fn_inputs={"target_tokens": [*ids[1:]], "weights": [1.0] * (len(ids) - 1)},
        )
        for ids in sequences
    ]


def trained_logprobs(items: Sequence[TrainingSample], answers: Sequence[Sequence[float]]) -> Tensor:
    """[K]: those of the trained tokens, sample by sample; an answer begins with the second token of a sequence."""
    pairs = zip(items, answers, strict=True)
    return torch.tensor([answer[at - 1] for item, answer in pairs for at in item.positions])


def _spread(item: TrainingSample, values: Tensor) -> tuple[float, ...]:
    """[K] -> a value for each token; 0 where nothing is trained."""
    whole = [0.0] * len(item.sample.input_ids)
    for at, value in zip(item.positions, values.tolist(), strict=True):
        whole[at] = value
    return tuple(whole)
