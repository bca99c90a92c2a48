"""Policy-gradient losses over the sampled tokens of a batch, and their aggregation to one number.

Everything is a flat vector of K sampled tokens; ``sequence[k]`` is the index of the sequence (of S) that token k
belongs to. The loss is the sum of ``weights * losses``. The weights (``token_mean`` and the others) are computed from
all sequences of a batch before it is split into micro-batches, so the result does not depend on the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Correction = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "sequence-product"]

# A product over thousands of tokens overflows float32. exp(20) and exp(-20) are outside any sensible clip range; verl
# uses the same bound.
_LOG_BOUND = 20.0


@dataclass(frozen=True)
class TokenBatch:
    """K sampled tokens of S sequences; all tensors [K], float32 but ``sequence`` (int64, 0 .. S - 1).

    ``old``: logprobs of the old policy, the denominator of the clipped ratio. ``advantages``: one per token.
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


def ppo(batch: TokenBatch, *, low: float = 0.2, high: float = 0.2) -> Tensor:
    """PPO's clipped objective (Schulman et al. 2017, arXiv 1707.06347). Returns [K] losses.

    ``high > low`` is DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476).
    """
    return _clipped(torch.exp(batch.logprobs - batch.old), batch.advantages, low, high)


def gspo(batch: TokenBatch, *, low: float = 0.2, high: float = 0.28) -> Tensor:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071): the ratio is the geometric mean of the sequence's token ratios.

    This is the paper's GSPO-token, which equals GSPO where all tokens of a sequence have one advantage. Aggregate with
    ``rollout_mean``. Where a rewritten history cut a rollout into several sequences, each of these answers its own
    prompt and has its own ratio, and all of them together have the weight of one rollout. The default clip range is
    DAPO's; the authors of GSPO use 3e-4 and 4e-4. Returns [K] losses.
    """
    of_sequence = batch.mean_of_sequence(batch.logprobs - batch.old).detach()
    ratio = torch.exp(batch.logprobs - batch.logprobs.detach() + of_sequence)
    return _clipped(ratio, batch.advantages, low, high)


def cispo(batch: TokenBatch, *, low: float | None = 0.2, high: float = 0.28) -> Tensor:
    """CISPO (MiniMax 2025, arXiv 2506.13585): REINFORCE with the ratio as a clipped weight without gradient.

    The ratio is clipped to ``1 - low`` and ``1 + high`` as in verl. ``low`` of ``None`` clips from above only, as in
    TRL, whose ``epsilon_high`` is the cap ``1 + high`` itself. Returns [K] losses.
    """
    ratio = torch.exp(batch.logprobs.detach() - batch.old)
    weight = ratio.clamp(min=None if low is None else 1 - low, max=1 + high)
    return -weight * batch.advantages * batch.logprobs


def kl_penalty(logprobs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimates of KL(policy || reference) from tokens of the policy. logprobs, reference: [K] -> [K] nats.

    From Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); verl and OpenRLHF use the same
    names. k1 is unbiased and may be negative. k2, as a loss, has the gradient of the KL. k3 is unbiased and never
    negative. For a loss see ``kl_loss``.
    """
    difference = logprobs - reference
    match kind:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference**2
        case "k3":
            return torch.exp(-difference) - 1 + difference


def kl_loss(batch: TokenBatch, reference: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """The KL term of a loss, for tokens of the old policy. reference: [K] logprobs -> [K] losses.

    The gradient of an estimate is not an estimate of the gradient: k1's alone has the mean 0, and k3's alone is that of
    KL(reference || policy). Multiplied by the ratio current / old, as in DeepSeek-V3.2 (arXiv 2512.02556, equation 7)
    and TRL's ``use_bias_correction_kl``, the mean of either's gradient over tokens of the old policy is exactly that of
    KL(policy || reference) of the next token. k2 has that gradient on tokens of the current policy already, so the
    ratio weighs it without a gradient of its own.
    """
    penalty = kl_penalty(batch.logprobs, reference, kind)
    ratio = torch.exp((batch.logprobs - batch.old).clamp(-_LOG_BOUND, _LOG_BOUND))
    return (ratio.detach() if kind == "k2" else ratio) * penalty


def correction_weights(
    batch: TokenBatch,
    behaviour: Tensor,
    *,
    mode: Correction,
    level: CorrectionLevel = "token",
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """Importance weights for tokens sampled by another policy or another engine: ``old / behaviour``.

    behaviour: [K] logprobs at sampling. ``truncate`` caps the weight at ``high`` (truncated importance sampling, Yao et
    al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). ``mask`` sets weights outside
    ``low .. high`` to 0 (IcePop, Ling Team 2025). The default ``high`` of 2.0 is verl's threshold, ``low`` its inverse.
    Returns [K] weights without gradient.

    At ``sequence`` level all tokens of a sequence have the geometric mean of their ratios, which does not grow with the
    length (verl, SkyRL and OpenRLHF reject sequences by it). At ``sequence-product`` level they have the product, the
    exact weight of the sequence, which moves away from 1 with the length. That is "sequence" in verl and SkyRL, and the
    ``sequence_`` modes of TRL, one of which is its default.
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
    """Every token has the same weight: DAPO (arXiv 2503.14476), verl's ``token-mean``, TRL's ``loss_type="dapo"``.

    lengths: [S] sampled tokens of each sequence -> [S] weights of their tokens.
    """
    return torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1)


def fixed_length(lengths: Tensor, longest: int, rollouts: int | None = None) -> Tensor:
    """Every token has the weight ``1 / (R longest)``, whatever its sequence's length: Dr. GRPO (arXiv 2503.20783).

    verl's ``seq-mean-token-sum-norm``, TRL's ``loss_type="dr_grpo"``. R is the number of rollouts, by default one for
    each of the S sequences. [S] -> [S].
    """
    return torch.full_like(lengths, 1.0 / ((rollouts or len(lengths)) * longest))


def rollout_mean(lengths: Tensor, rollout: Tensor) -> Tensor:
    """Every rollout has the same weight, however many sequences it was split into: GRPO (arXiv 2402.03300), GSPO.

    verl's ``seq-mean-token-mean``, TRL's ``loss_type="grpo"``. GRPO and GSPO average over whole outputs, which a
    rollout with a rewritten history has in several sequences.
    ``rollout[s]`` is the index (from 0) of the rollout that sequence s belongs to. lengths, rollout: [S] -> [S].
    """
    tokens = tokens_per_rollout(lengths, rollout)
    return 1.0 / (tokens.clamp(min=1)[rollout] * max(len(tokens), 1))


def tokens_per_rollout(lengths: Tensor, rollout: Tensor) -> Tensor:
    """The sampled tokens of each rollout; the arguments are those of ``rollout_mean``. Returns [R]."""
    rollouts = int(rollout.max()) + 1 if len(rollout) else 0
    return lengths.new_zeros(rollouts).index_add_(0, rollout, lengths)


def preference(
    chosen: Tensor, rejected: Tensor, chosen_reference: Tensor, rejected_reference: Tensor, *, beta: float = 0.1
) -> Tensor:
    """DPO's sigmoid loss (Rafailov et al. 2023, arXiv 2305.18290). Returns [P] losses.

    All arguments are [P] logprobs summed over each completion of P pairs. ``beta`` of 0.1 is the default of TRL too.
    """
    margin = (chosen - chosen_reference) - (rejected - rejected_reference)
    return -torch.nn.functional.logsigmoid(beta * margin)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
