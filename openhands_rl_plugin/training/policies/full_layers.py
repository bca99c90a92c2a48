"""Logprobs of given tokens where the output layer is trained too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openhands_rl_plugin.training.losses.logprobs import ROWS_AT_A_TIME, entropy_slopes, next_token_logprobs


def trained_token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperatures: Tensor | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """As ``logprobs.token_logprobs``, but with gradients for ``weight`` and ``bias`` as well.

    Logits are in memory for ``ROWS_AT_A_TIME`` positions only. They are recomputed in the backward pass, because the
    gradient of the weights needs the gradient of the loss.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, targets, weight, bias, temperatures, entropy_gradient)
    return logprobs, entropies if entropy_gradient else entropies.detach()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for rows in _chunks(len(targets)):
            distribution = next_token_logprobs(hidden[rows], weight, bias, _part(temperatures, rows))
            logprobs[rows] = distribution.gather(1, targets[rows, None])[:, 0]
            entropies[rows] = -torch.linalg.vecdot(distribution.exp(), distribution)
        ctx.save_for_backward(hidden, targets, weight, bias, temperatures)
        ctx.entropy_gradient = entropy_gradient
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = grad_outputs
        hidden, targets, weight, bias, temperatures = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for rows in _chunks(len(targets)):
            own = _part(temperatures, rows)
            distribution = next_token_logprobs(hidden[rows], weight, bias, own)
            probabilities = distribution.exp()
            at = torch.arange(probabilities.shape[0], device=probabilities.device)
            slopes = -probabilities * grad_logprobs[rows, None]
            slopes[at, targets[rows]] += grad_logprobs[rows]
            if ctx.entropy_gradient:
                entropies = -torch.linalg.vecdot(probabilities, distribution)
                slopes += entropy_slopes(probabilities, distribution, entropies) * grad_entropies[rows, None]
            if own is not None:
                slopes /= own[:, None]
            if grad_bias is not None:
                grad_bias += slopes.sum(0)
            low = slopes.to(weight.dtype)
            grad_hidden[rows] = low @ weight
            grad_weight += low.t() @ hidden[rows]
        return (
            grad_hidden,
            None,
            grad_weight.to(weight.dtype),
            grad_bias.to(weight.dtype) if grad_bias is not None else None,
            None,
            None,
        )


def _part(temperatures: Tensor | None, rows: slice) -> Tensor | None:
    return None if temperatures is None else temperatures[rows]


def _chunks(count: int) -> list[slice]:
    return [slice(start, start + ROWS_AT_A_TIME) for start in range(0, count, ROWS_AT_A_TIME)]
