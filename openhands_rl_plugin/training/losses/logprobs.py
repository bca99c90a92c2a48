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
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperatures: Tensor | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of next tokens, in float32.

    hidden: [K, width], the states that predict; targets: [K] token ids; weight: [vocabulary, width] and bias of the
    frozen output layer; temperatures: [K] float32, what the logits are divided by, ``None`` for 1. Returns ([K]
    logprobs, [K] entropies) of the distribution at that temperature; the logprobs carry gradient, to ``hidden`` alone,
    and with ``entropy_gradient`` the entropies too, for another [K, width] of memory.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, targets, weight, bias, temperatures, entropy_gradient)
    return logprobs, entropies if entropy_gradient else entropies.detach()


def next_token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, temperatures: Tensor | None = None
) -> Tensor:
    """[K, vocabulary] logprobs in float32 of the distributions at the ``temperatures`` ([K], ``None`` for 1)."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return torch.log_softmax(logits if temperatures is None else logits / temperatures[:, None], dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    """The gradient of a logprob with respect to its hidden state is ``(W[target] - softmax(logits) W) / temperature``,
    one row of ``width`` numbers, and that of the entropy H is ``-(p (log p + H)) W / temperature``. They are computed
    along with the logits, so these are neither kept nor computed again."""

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
        wanted = ctx.needs_input_grad[0]
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        slopes = torch.empty_like(hidden) if wanted else hidden.new_empty(0)
        spread = torch.empty_like(hidden) if wanted and entropy_gradient else hidden.new_empty(0)
        for start in range(0, len(targets), ROWS_AT_A_TIME):
            rows = slice(start, start + ROWS_AT_A_TIME)
            own = None if temperatures is None else temperatures[rows]
            distribution = next_token_logprobs(hidden[rows], weight, bias, own)
            logprobs[rows] = distribution.gather(1, targets[rows, None])[:, 0]
            probabilities = distribution.exp()
            entropies[rows] = -torch.linalg.vecdot(probabilities, distribution)
            if wanted:
                slopes[rows] = weight[targets[rows]] - probabilities.to(weight.dtype) @ weight
            if wanted and entropy_gradient:
                spread[rows] = entropy_slopes(probabilities, distribution, entropies[rows]).to(weight.dtype) @ weight
            if wanted and own is not None:
                slopes[rows] /= own[:, None]
                if entropy_gradient:
                    spread[rows] /= own[:, None]
        ctx.save_for_backward(slopes, spread)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        grad_logprobs, grad_entropies = grad_outputs
        slopes, spread = ctx.saved_tensors
        gradient = slopes * grad_logprobs[:, None]
        if len(spread):
            gradient = gradient + spread * grad_entropies[:, None]
        return gradient.to(slopes.dtype), None, None, None, None, None


def entropy_slopes(probabilities: Tensor, logprobs: Tensor, entropies: Tensor) -> Tensor:
    """[K, vocabulary]: the gradient of each row's entropy with respect to its logits, ``-p (log p + H)``.

    ``logprobs`` are those of all tokens. A token of probability 0 has a gradient of 0.
    """
    return (-probabilities * (logprobs + entropies[:, None])).nan_to_num_(nan=0.0)
