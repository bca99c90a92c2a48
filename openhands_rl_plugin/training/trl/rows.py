"""Training samples as the inputs of TRL's GRPO loss, so that it gives the gradient of our optimiser batch.

TRL's ``loss_type="dapo"`` and ``"cispo"`` add up the losses of tokens and divide by ``num_items_in_batch``, which is 1
here: the weight of a token in the batch, from ``aggregation``, and its importance correction are in its advantage.
Clipping does not change by a positive factor. Segments of an episode are rows with the episode's advantage each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.training.algorithms import algorithm_of, clip_bounds
from openhands_rl_plugin.training.losses.losses import correction_of
from openhands_rl_plugin.training.losses.micro_batches import TrainingSample
from openhands_rl_plugin.training.losses.objectives import TokenBatch


@dataclass(frozen=True, eq=False)
class TrainedRow:
    """A sequence with K trained tokens. ``factors``: [K], the advantages with all weights in them; ``old``: [K], the
    old policy's logprobs, ``None`` where a ratio of 1 is wanted; ``weight``: of a token of it in the batch."""

    item: TrainingSample
    weight: float
    factors: Tensor
    old: Tensor | None

    @property
    def start(self) -> int:
        """The index of the first trained token: what is before it is the prompt."""
        return self.item.positions[0]


def policy_rows(
    live: Sequence[TrainingSample], weights: Sequence[float], settings: TrainingSettings
) -> list[TrainedRow]:
    """The rows of a batch for a policy gradient. Raises ``TrainingError`` for what the loss cannot express."""
    made = []
    for item, weight in zip(live, weights, strict=True):
        one = torch.zeros(len(item.positions), dtype=torch.int64)
        tokens = TokenBatch(item.old, item.old, item.advantages, sequence=one, sequences=1)
        factors = item.advantages * weight * correction_of(settings, tokens, item.recorded)
        if algorithm_of(settings).objective == "gspo" and bool((factors != factors[0]).any()):
            raise TrainingError(
                'engine = "trl" has one advantage a sequence with algorithm = "gspo": leave step_rewards, tree, '
                'repeat_penalty and correction at their defaults, or set engine = "local"'
            )
        made.append(TrainedRow(item, weight, factors, item.old))
    return made


def likelihood_rows(live: Sequence[TrainingSample], weights: Sequence[float]) -> list[TrainedRow]:
    """The rows of a batch for the mean negative log-likelihood, which is CISPO with a ratio of 1."""
    return [
        TrainedRow(item, weight, torch.full((len(item.positions),), weight), None)
        for item, weight in zip(live, weights, strict=True)
    ]


def loss_arguments(settings: TrainingSettings, *, imitates: bool) -> dict[str, object]:
    """The arguments of ``GRPOConfig`` that name the loss. TRL's CISPO has an absolute bound, its ``delta`` is PPO's
    dual clip."""
    if imitates:
        return {"loss_type": "cispo", "epsilon_high": 1.0}
    low, high = clip_bounds(settings)
    objective = algorithm_of(settings).objective
    if objective == "cispo":
        return {"loss_type": "cispo", "epsilon_high": 1 + high}
    return {
        "loss_type": "dapo",
        "epsilon": low,
        "epsilon_high": high,
        "delta": settings.dual_clip or None,
        "importance_sampling_level": "sequence" if objective == "gspo" else "token",
    }


def temperature_of(items: Sequence[TrainingSample]) -> float:
    """The temperature of all trained tokens: TRL has one for a run. Raises ``TrainingError`` for several."""
    found = {1.0 for item in items if item.temperatures is None}
    found |= {each for item in items if item.temperatures is not None for each in item.temperatures.tolist()}
    if len(found) > 1:
        said = ", ".join(f"{each:g}" for each in sorted(found))
        raise TrainingError(
            f'engine = "trl" trains at one temperature, and these answers were sampled at {said}: choose episodes of '
            'one, or set engine = "local"'
        )
    return found.pop() if found else 1.0


def slots(batches: Sequence[Sequence[TrainedRow]], processes: int) -> list[list[TrainedRow | None]]:
    """As many rows for each batch, a multiple of ``processes`` and two at least: TRL has as many micro-batches of one
    row in every step. The longest come first; ``None`` is a row without trained tokens."""
    most = max((len(batch) for batch in batches), default=0)
    size = max(2, -(-most // processes) * processes)
    made = list[list[TrainedRow | None]]()
    for batch in batches:
        longest_first = sorted(batch, key=lambda row: -len(row.item.sample.input_ids))
        made.append([*longest_first, *[None] * (size - len(batch))])
    return made


def inputs_of(row: TrainedRow | None, device: torch.device) -> dict[str, Tensor]:
    """What ``GRPOTrainer._compute_loss`` takes: the ids as they were sampled, [1, prompt] and [1, completion].

    ``tool_mask`` is 1 for trained tokens. ``None``: two tokens without a loss.
    """
    if row is None:
        ids, start, at = [0, 0], 1, torch.empty(0, dtype=torch.int64)
        factors = torch.empty(0)
    else:
        ids, start, factors = [*row.item.sample.input_ids], row.start, row.factors
        at = torch.tensor(row.item.positions) - start
    prompt, completion = torch.tensor([ids[:start]]), torch.tensor([ids[start:]])
    found: dict[str, Tensor] = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "tool_mask": _spread(completion, at, 1).long(),
        "advantages": _spread(completion, at, factors),
        "num_items_in_batch": torch.ones(()),
    }
    if row is not None and row.old is not None:
        found["old_per_token_logps"] = _spread(completion, at, row.old)
    return {name: value.to(device) for name, value in found.items()}


def _spread(like: Tensor, at: Tensor, values: Tensor | int) -> Tensor:
    """[1, completion] float32: the values at their places, 0 elsewhere."""
    whole = torch.zeros(like.shape)
    whole[0, at] = torch.as_tensor(values, dtype=torch.float32)
    return whole


def numbers_of(inputs: Mapping[str, Tensor], *each: Tensor) -> tuple[Tensor, ...]:
    """[K] of each [1, completion]: of the trained tokens."""
    trained = inputs["tool_mask"][0].bool()
    return tuple(values[0].detach()[trained] for values in each)
