"""The output layer of a model, with what some families do to its result: a factor, or a soft cap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from openhands_rl_plugin.training.losses.logprobs import ROWS_AT_A_TIME


@dataclass(frozen=True)
class OutputScale:
    """``logits = cap * tanh(factor * z / cap)`` of the output layer's ``z``; without ``cap``, ``factor * z``.

    Granite, Cohere and Falcon-H1 have a factor, Gemma 2 and Gemma 4 a cap.
    """

    factor: float = 1.0
    cap: float | None = None

    def logits(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        """[K, vocabulary] float32 logits of [K, width] hidden states."""
        return _scaled(hidden, head.weight, head.bias, self.factor, self.cap)


def measure_scale(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> OutputScale:
    """The scale of a model that gave ``logits`` [T, vocabulary] where its last hidden states are [T, width].

    The factor is measured, because every family has another name for it, and taken from the configuration where one of
    the known names has the measured value.
    """
    config = model.config.get_text_config()
    if cap := getattr(config, "final_logit_softcapping", None):
        return OutputScale(cap=float(cap))
    plain = OutputScale().logits(hidden, model.get_output_embeddings())  # pyright: ignore[reportArgumentType]
    size = plain.square().sum()
    measured = ((plain * logits.float()).sum() / size).item() if size > 0 else 1.0
    known = [1.0, getattr(config, "logit_scale", None), getattr(config, "lm_head_multiplier", None)]
    if divisor := getattr(config, "logits_scaling", None):
        known.append(1.0 / divisor)
    near = [float(each) for each in known if each and abs(float(each) - measured) <= 0.01 * abs(measured)]
    return OutputScale(near[0] if near else measured)


def scaled_token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: nn.Linear,
    scale: OutputScale,
    temperatures: Tensor | None = None,
    *,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """As ``logprobs.token_logprobs``, with a cap, and with gradients for the output layer where it is trained."""
    parts = [
        checkpoint(
            _one_chunk,
            hidden[start : start + ROWS_AT_A_TIME],
            targets[start : start + ROWS_AT_A_TIME],
            head.weight,
            head.bias,
            scale,
            None if temperatures is None else temperatures[start : start + ROWS_AT_A_TIME],
            entropy_gradient,
            use_reentrant=False,
        )
        for start in range(0, max(1, len(targets)), ROWS_AT_A_TIME)  # of no targets: empty, with a gradient
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _one_chunk(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: OutputScale,
    temperatures: Tensor | None,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logits = _scaled(hidden, weight, bias, scale.factor, scale.cap)
    distribution = torch.log_softmax(logits if temperatures is None else logits / temperatures[:, None], dim=-1)
    spread = distribution if entropy_gradient else distribution.detach()
    return distribution.gather(1, targets[:, None])[:, 0], -torch.linalg.vecdot(spread.exp(), spread)


def _scaled(hidden: Tensor, weight: Tensor, bias: Tensor | None, factor: float, cap: float | None) -> Tensor:
    logits = F.linear(hidden.to(weight.dtype), weight, bias).float() * factor
    return logits if cap is None else torch.tanh(logits / cap) * cap
