"""Logprobs of given tokens, and training diagnostics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from openhands_rl_plugin.training.losses.objectives import TokenBatch

ROWS_AT_A_TIME = 128
"""Positions whose logits are in memory at the same time: 128 rows of a vocabulary of 150,000 in float32 are 77 MB."""


@dataclass(frozen=True)
class Diagnostics:
    """Means over the trained tokens of one or more micro-batches; ``+`` combines them.

    ``ratio``: importance ratio, current / old probability. ``approx_kl``: k3 estimate of KL(old || current), in nats.
    ``clip_share``: share of tokens whose gradient is clipped to zero. ``entropy``: of the next-token distribution.
    ``drift``: mean absolute difference of the logprobs from the recorded ones. ``kl``: the KL term, an estimate of the
    divergence from the base model, with a teacher of that from the teacher. ``weight``: importance weight of the
    correction for stale rollouts.
    """

    tokens: int = 0
    ratio: float = 1.0
    approx_kl: float = 0.0
    clip_share: float = 0.0
    entropy: float = 0.0
    drift: float = 0.0
    kl: float = 0.0
    weight: float = 1.0

    def __add__(self, other: Diagnostics) -> Diagnostics:
        total = self.tokens + other.tokens
        if total == 0:
            return self
        mine, theirs = asdict(self), asdict(other)
        means = {
            name: (mine[name] * self.tokens + theirs[name] * other.tokens) / total for name in mine if name != "tokens"
        }
        return Diagnostics(tokens=total, **means)


@torch.no_grad()
def diagnose(batch: TokenBatch, entropies: Tensor, *, ratio: Tensor, low: float, high: float) -> Diagnostics:
    """Diagnostics of one micro-batch. ``ratio`` ([K]) is the ratio that is clipped to 1 - low .. 1 + high."""
    log_ratio = batch.logprobs - batch.old
    clipped = ((ratio > 1 + high) & (batch.advantages > 0)) | ((ratio < 1 - low) & (batch.advantages < 0))
    return Diagnostics(
        tokens=batch.logprobs.numel(),
        ratio=log_ratio.exp().mean().item(),
        approx_kl=(log_ratio.exp() - 1 - log_ratio).mean().item(),
        clip_share=clipped.float().mean().item(),
        entropy=entropies.mean().item(),
    )


def token_logprobs(
    hidden: Tensor, targets: Tensor, weight: Tensor, temperatures: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of next tokens, in float32.

    hidden: [K, width], the states that predict; targets: [K] token ids; weight: [vocabulary, width] of the frozen
    output layer; temperatures: [K] float32, what the logits are divided by, ``None`` for 1. Returns ([K] logprobs, [K]
    entropies) of the distribution at that temperature; the logprobs carry gradient, to ``hidden`` alone.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, targets, weight, temperatures)
    return logprobs, entropies.detach()


class _TokenLogprobs(torch.autograd.Function):
    """The gradient of a logprob with respect to its hidden state is ``(W[target] - softmax(logits) W) / temperature``,
    one row of ``width`` numbers. It is computed along with the logits, so these are neither kept nor computed again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, weight: Tensor, temperatures: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        slopes = torch.empty_like(hidden) if wanted else hidden.new_empty(0)
        for start in range(0, len(targets), ROWS_AT_A_TIME):
            rows = slice(start, start + ROWS_AT_A_TIME)
            own = None if temperatures is None else temperatures[rows, None]
            logits = torch.nn.functional.linear(hidden[rows], weight).float()
            distribution = torch.log_softmax(logits if own is None else logits / own, dim=-1)
            logprobs[rows] = distribution.gather(1, targets[rows, None])[:, 0]
            probabilities = distribution.exp()
            entropies[rows] = -torch.linalg.vecdot(probabilities, distribution)
            if wanted:
                slopes[rows] = weight[targets[rows]] - probabilities.to(weight.dtype) @ weight
                if own is not None:
                    slopes[rows] /= own
        ctx.save_for_backward(slopes)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grad_outputs[0][:, None]).to(slopes.dtype), None, None, None
