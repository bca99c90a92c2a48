"""Logprobs of chosen tokens, the losses over them, and what to watch while training.

Losses here are per token; the caller divides the sum by the number of sampled tokens in the whole optimiser batch, so
the result does not depend on how the batch was cut into passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS_AT_A_TIME = 128
"""Logits exist for this many positions only, which bounds the memory at 128 x vocabulary floats."""


@dataclass(frozen=True)
class Diagnostics:
    """Means over the trained tokens of one pass or more; add passes with ``+``.

    ``ratio``: probability now / when sampled. ``approx_kl``: the k3 estimate of KL(sampler || now), in nats.
    ``clip_share``: share of tokens whose gradient the clip has cut off. ``entropy``: of the next-token distribution.
    """

    tokens: int = 0
    ratio: float = 1.0
    approx_kl: float = 0.0
    clip_share: float = 0.0
    entropy: float = 0.0

    def __add__(self, other: Diagnostics) -> Diagnostics:
        total = self.tokens + other.tokens
        if total == 0:
            return self

        def mean(mine: float, theirs: float) -> float:
            return (mine * self.tokens + theirs * other.tokens) / total

        return Diagnostics(
            tokens=total,
            ratio=mean(self.ratio, other.ratio),
            approx_kl=mean(self.approx_kl, other.approx_kl),
            clip_share=mean(self.clip_share, other.clip_share),
            entropy=mean(self.entropy, other.entropy),
        )


def policy_losses(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's clipped objective with separate bounds (DAPO), no dual clip: [K] losses, one for each sampled token."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


@torch.no_grad()
def diagnose(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    entropies: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Diagnostics:
    """Diagnostics of one pass; all tensors [K]."""
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Diagnostics(
        tokens=logprobs.numel(),
        ratio=ratio.mean().item(),
        approx_kl=(ratio - 1 - log_ratio).mean().item(),
        clip_share=(clipped * advantages < ratio * advantages).float().mean().item(),
        entropy=entropies.mean().item(),
    )


def token_logprobs(
    hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of next tokens, in float32.

    hidden: [K, width], the states that predict; targets: [K] token ids; weight: [vocabulary, width] and bias of the
    frozen output layer. Returns ([K] logprobs, [K] entropies); only the logprobs carry gradient, to ``hidden`` alone.
    """
    return _TokenLogprobs.apply(hidden, targets, weight, bias)


class _TokenLogprobs(torch.autograd.Function):
    """The gradient of a logprob with respect to its hidden state is ``W[target] - softmax(logits) W``, one row of
    ``width`` numbers. It is computed along with the logits, so these are neither kept nor computed again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        slopes = torch.empty_like(hidden) if wanted else hidden.new_empty(0)
        for start in range(0, len(targets), ROWS_AT_A_TIME):
            rows = slice(start, start + ROWS_AT_A_TIME)
            logits = torch.nn.functional.linear(hidden[rows], weight, bias).float()
            distribution = torch.log_softmax(logits, dim=-1)
            logprobs[rows] = distribution.gather(1, targets[rows, None])[:, 0]
            probabilities = distribution.exp()
            entropies[rows] = -torch.linalg.vecdot(probabilities, distribution)
            if wanted:
                slopes[rows] = weight[targets[rows]] - probabilities.to(weight.dtype) @ weight
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropies: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grad_logprobs[:, None]).to(slopes.dtype), None, None, None
