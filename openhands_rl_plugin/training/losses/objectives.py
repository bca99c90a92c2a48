"""Policy-gradient losses over the sampled tokens of a batch, and how token losses become one number.

Everything is a flat vector of K sampled tokens; ``sequence[k]`` says which of S sequences token k belongs to. A loss is
a sum of ``weights * losses``: the weights of a batch (``token_mean`` and the others) are made from all of its sequences
before it is split into micro-batches, so the result does not depend on the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Correction = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "sequence-product"]

# A product over thousands of tokens leaves float32; e to the 20 and to the -20 lie beyond all bounds (as in verl).
_LOG_BOUND = 20.0


@dataclass(frozen=True)
class TokenBatch:
    """K sampled tokens of S sequences; all tensors [K], float32 but ``sequence`` (int64, 0 .. S - 1).

    ``old`` are the logprobs that the clip is around, ``advantages`` one number a token.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    sequence: Tensor
    sequences: int

    def sum_of_sequence(self, values: Tensor) -> Tensor:
        """[K]: every token gets the sum of ``values`` over its sequence."""
        return values.new_zeros(self.sequences).index_add_(0, self.sequence, values)[self.sequence]

    def mean_of_sequence(self, values: Tensor) -> Tensor:
        """[K]: every token gets the mean of ``values`` over its sequence."""
        return self.sum_of_sequence(values) / self.sum_of_sequence(torch.ones_like(values))


def ppo(batch: TokenBatch, *, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Tensor:
    """PPO's clipped objective (Schulman et al. 2017); ``high > low`` is DAPO's clip-higher (arXiv 2503.14476).

    ``dual``: the lower bound of the ratio's effect where the advantage is negative (Ye et al. 2020, arXiv 1912.09729);
    verl uses 3 unless told otherwise, TRL and OpenRLHF none. Returns [K] losses.
    """
    return _clipped(torch.exp(batch.logprobs - batch.old), batch.advantages, low, high, dual)


def gspo(batch: TokenBatch, *, low: float = 0.2, high: float = 0.28) -> Tensor:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071): the ratio is that of the sequence, per token by geometric mean.

    The gradient goes through every token (GSPO-token), which is the same where a sequence has one advantage. To be
    averaged by ``sequence_mean``. Returns [K] losses.
    """
    of_sequence = batch.mean_of_sequence(batch.logprobs - batch.old).detach()
    ratio = torch.exp(batch.logprobs - batch.logprobs.detach() + of_sequence)
    return _clipped(ratio, batch.advantages, low, high, None)


def cispo(batch: TokenBatch, *, low: float | None = 0.2, high: float = 0.28) -> Tensor:
    """CISPO (MiniMax 2025, arXiv 2506.13585): REINFORCE with the ratio as a clipped weight without gradient.

    The ratio is kept within ``1 - low`` and ``1 + high`` (verl); ``low`` of ``None`` clips above only (TRL, whose
    ``epsilon_high`` is the cap ``1 + high`` itself). Returns [K] losses.
    """
    ratio = torch.exp(batch.logprobs.detach() - batch.old)
    weight = ratio.clamp(min=None if low is None else 1 - low, max=1 + high)
    return -weight * batch.advantages * batch.logprobs


def kl_penalty(logprobs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimates of KL(policy || reference) from tokens of the policy (Schulman 2020, "Approximating KL divergence").

    k1 is unbiased and may be negative; k2 has the right gradient as a loss; k3 is unbiased and never negative.
    logprobs, reference: [K] -> [K] nats.
    """
    difference = logprobs - reference
    match kind:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference**2
        case "k3":
            return torch.exp(-difference) - 1 + difference


def correction_weights(
    batch: TokenBatch,
    behaviour: Tensor,
    *,
    mode: Correction,
    level: CorrectionLevel = "token",
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """Importance weights for tokens that another policy, or another engine, has sampled: ``old / behaviour``.

    behaviour: [K] logprobs as they were sampled. ``truncate`` caps the weight at ``high`` (truncated importance
    sampling, Yao et al. 2025); ``mask`` gives 0 to what lies outside ``low .. high``. Returns [K] weights without
    gradient.

    At ``sequence`` level all tokens of a sequence have the geometric mean of their ratios, which does not grow with the
    length (verl, SkyRL and OpenRLHF choose by it which sequences to leave out). At ``sequence-product`` they have the
    product, the exact weight of the sequence, which goes far from 1 with the length: "sequence" in verl and SkyRL, and
    the ``sequence_`` modes of TRL, one of which is its default.
    """
    if mode == "none":
        return torch.ones_like(behaviour)
    difference = (batch.old - behaviour).detach()
    match level:
        case "token":
            ratio = torch.exp(difference)
        case "sequence":
            ratio = torch.exp(batch.mean_of_sequence(difference))
        case "sequence-product":
            ratio = torch.exp(batch.sum_of_sequence(difference).clamp(-_LOG_BOUND, _LOG_BOUND))
    if mode == "truncate":
        return ratio.clamp(max=high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def token_mean(lengths: Tensor) -> Tensor:
    """[S] sampled tokens of each sequence -> [S] weights of their tokens: every token counts the same (DAPO)."""
    return torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1)


def sequence_mean(lengths: Tensor) -> Tensor:
    """Every sequence counts the same, its tokens share its weight (GRPO, GSPO). [S] -> [S]."""
    return 1.0 / (lengths.clamp(min=1) * len(lengths))


def fixed_length(lengths: Tensor, longest: int) -> Tensor:
    """Every token counts ``1 / (S longest)``, whatever its sequence's length (Dr. GRPO). [S] -> [S]."""
    return torch.full_like(lengths, 1.0 / (len(lengths) * longest))


def rollout_mean(lengths: Tensor, rollout: Tensor) -> Tensor:
    """Every rollout counts the same, however many sequences it was recorded as. lengths, rollout: [S] -> [S].

    ``rollout[s]`` is the number (from 0) of the rollout that sequence s belongs to.
    """
    rollouts = int(rollout.max()) + 1 if len(rollout) else 0
    tokens = lengths.new_zeros(rollouts).index_add_(0, rollout, lengths)
    return 1.0 / (tokens.clamp(min=1)[rollout] * max(rollouts, 1))


def preference(
    chosen: Tensor, rejected: Tensor, chosen_reference: Tensor, rejected_reference: Tensor, *, beta: float = 0.1
) -> Tensor:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290). All [P] summed logprobs of a pair's answers; returns [P] losses."""
    margin = (chosen - chosen_reference) - (rejected - rejected_reference)
    return -torch.nn.functional.logsigmoid(beta * margin)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual * advantages), losses)
