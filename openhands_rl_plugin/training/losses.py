"""Samples into optimiser batches and micro-batches, and the loss of one, by the algorithm that the settings name.

In the formulas everything is a flat vector of K sampled tokens; ``sequence[k]`` is the index of the sequence (of S)
that token k belongs to. The loss is the sum of ``weights * losses``. The weights (``token_mean`` and the others) are
computed from all sequences of a batch before it is split into micro-batches, so the split
changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.arrays import Floats, Ids
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.algorithms import (
    Kind,
    OldLogprobs,
    aggregation_of,
    algorithm_of,
    clip_bounds,
    old_logprobs_of,
)
from openhands_rl_plugin.training.data.dataset import PreferencePair
from openhands_rl_plugin.training.data.packing import pack

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


def kl_loss(batch: TokenBatch, reference: Tensor) -> Tensor:
    """The KL term of a loss, for tokens of the old policy. reference: [K] logprobs -> [K] losses, in nats.

    The k3 estimate of KL(policy || reference) (Schulman 2020, joschu.net/blog/kl-approx.html) is unbiased and never
    negative, but its gradient alone is that of KL(reference || policy). Multiplied by the ratio current / old, as in
    DeepSeek-V3.2 (arXiv 2512.02556, equation 7) and TRL's ``use_bias_correction_kl``, the mean of its gradient over
    tokens of the old policy is exactly that of KL(policy || reference) of the next token.
    """
    difference = batch.logprobs - reference
    ratio = torch.exp((batch.logprobs - batch.old).clamp(-_LOG_BOUND, _LOG_BOUND))
    return ratio * (torch.exp(-difference) - 1 + difference)


def correction_weights(batch: TokenBatch, behaviour: Tensor, *, high: float = 2.0) -> Tensor:
    """Importance weights for tokens sampled by another policy or another engine: ``old / behaviour``, ``high`` at most.

    behaviour: [K] logprobs at sampling. This is truncated importance sampling (Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"); 2.0 is verl's threshold. Returns [K], without gradient.
    """
    return torch.exp((batch.old - behaviour).detach()).clamp(max=high)


def token_mean(lengths: Tensor) -> Tensor:
    """Every token has the same weight: DAPO (arXiv 2503.14476), verl's ``token-mean``, TRL's ``loss_type="dapo"``.

    lengths: [S] sampled tokens of each sequence -> [S] weights of their tokens.
    """
    return torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1)


def fixed_length(lengths: Tensor, longest: int, rollouts: int) -> Tensor:
    """Every token has the weight ``1 / (R longest)``, whatever its sequence's length: Dr. GRPO (arXiv 2503.20783).

    verl's ``seq-mean-token-sum-norm``, TRL's ``loss_type="dr_grpo"``. R is the number of rollouts. [S] -> [S].
    """
    return torch.full_like(lengths, 1.0 / (rollouts * longest))


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


ROWS_AT_A_TIME = 128
"""Positions whose logits are in memory at the same time: 128 rows of a vocabulary of 150,000 in float32 are 77 MB."""


SUMS: tuple[str, ...] = ("tokens", "ratio", "approx_kl", "clip_share", "entropy", "drift", "kl", "weight")
"""Sums over the trained tokens of a micro-batch, besides the loss: the count; the importance ratio, current / old
probability; the k3 estimate of KL(old || current), in nats; how many gradients are clipped to zero; the entropy of the
next-token distribution; the absolute difference of the logprobs from the recorded ones; the KL term, an estimate of the
divergence from the base model, or from the teacher; the importance weight of the correction for stale rollouts."""


@torch.no_grad()
def diagnose(batch: TokenBatch, entropies: Tensor, *, ratio: Tensor, low: float, high: float) -> dict[str, float]:
    """The sums of one micro-batch. ``ratio`` ([K]) is the ratio that is clipped to 1 - low .. 1 + high."""
    log_ratio = batch.logprobs - batch.old
    clipped = ((ratio > 1 + high) & (batch.advantages > 0)) | ((ratio < 1 - low) & (batch.advantages < 0))
    found = {
        "tokens": torch.ones_like(log_ratio),
        "ratio": log_ratio.exp(),
        "approx_kl": log_ratio.exp() - 1 - log_ratio,
        "clip_share": clipped,
        "entropy": entropies,
    }
    return {name: each.sum().item() for name, each in found.items()}


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


@dataclass(eq=False)
class TrainingSample:
    """A sample and its K trained tokens; all tensors [K] float32, on the CPU.

    ``recorded``: logprobs at sampling. ``old``: the old policy's logprobs, the denominator of the importance ratio (for
    DPO, the reference model's). ``reference``: the base model's logprobs, for the KL term; ``teacher``: a teacher's.
    ``unit``: the index of the rollout or pair; samples of a unit are in the same optimiser batch. ``chosen``: whether
    it is the chosen completion. ``temperatures``: what the trainer divides the logits by, ``None`` for 1: those that
    were sampled at.
    """

    sample: Sample
    unit: int
    chosen: bool = False
    positions: Ids = field(init=False)
    recorded: Tensor = field(default_factory=lambda: torch.empty(0))
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))
    old: Tensor = field(default_factory=lambda: torch.empty(0))
    reference: Tensor | None = None
    teacher: Tensor | None = None
    temperatures: Tensor | None = None

    def __post_init__(self) -> None:
        sample = self.sample
        self.positions = Ids(compress(range(len(sample.mask)), sample.mask))
        self.recorded = self.of_trained(sample.logprobs, 0.0)
        self.advantages = self.of_trained(sample.token_advantages, sample.advantage)
        self.old = self.recorded
        if sample.teacher_logprobs:
            self.teacher = self.of_trained(sample.teacher_logprobs, 0.0)

    def of_trained(self, by_token: Floats, each: float) -> Tensor:
        """[K]: those of the trained tokens, or ``each`` for all."""
        return torch.tensor([*compress(by_token, self.sample.mask)] if by_token else [each] * len(self.positions))


def samples_from_rollouts(samples: Sequence[Sample], *, as_sampled: bool = False) -> list[TrainingSample]:
    """Training samples of rollouts; a unit is a trajectory.

    ``as_sampled``: reinforce the distributions at the temperatures of sampling; imitation wants that of temperature 1.
    """
    units: dict[str, int] = {}
    items = [TrainingSample(sample, units.setdefault(sample.trajectory_id, len(units))) for sample in samples]
    for item in items if as_sampled else ():
        temperatures = item.of_trained(item.sample.token_temperatures, item.sample.temperature)
        if bool((temperatures != 1.0).any()):
            item.temperatures = temperatures
    return items


def temperatures_of(items: Sequence[TrainingSample]) -> Tensor | None:
    """[K]: the temperatures of the trained tokens of a micro-batch, in order; ``None`` where all are 1."""
    if all(item.temperatures is None for item in items):
        return None
    return torch.cat(
        [torch.ones(len(item.positions)) if item.temperatures is None else item.temperatures for item in items]
    )


def samples_from_pairs(pairs: Sequence[PreferencePair]) -> list[TrainingSample]:
    """Training samples of preference pairs; a unit is a pair."""
    return [
        TrainingSample(sample, unit, chosen)
        for unit, pair in enumerate(pairs)
        for chosen, half in ((True, pair.chosen), (False, pair.rejected))
        for sample in half
    ]


def batches(items: Sequence[TrainingSample], *, size: int, epochs: int, seed: str) -> list[list[TrainingSample]]:
    """Optimiser batches of all epochs: ``size`` units each, in a new order every epoch."""
    by_unit = _by_unit(items)
    made: list[list[TrainingSample]] = []
    for epoch in range(epochs):
        order = list(by_unit)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        starts = range(0, len(order), size)
        made += [[item for unit in order[start : start + size] for item in by_unit[unit]] for start in starts]
    return made


def _by_unit(items: Sequence[TrainingSample]) -> dict[int, list[TrainingSample]]:
    units: dict[int, list[TrainingSample]] = {}
    for item in items:
        units.setdefault(item.unit, []).append(item)
    return units


def micro_batches(items: Sequence[TrainingSample], max_tokens: int, *, whole_units: bool) -> list[list[TrainingSample]]:
    """Micro-batches of at most ``max_tokens`` rows; ``whole_units`` keeps a unit in one, however long it is."""
    if whole_units:
        return _micro_batches_of_units(items, max_tokens)
    by_sample = {id(item.sample): item for item in items}
    return [[by_sample[id(sample)] for sample in group] for group in pack([item.sample for item in items], max_tokens)]


def _micro_batches_of_units(items: Sequence[TrainingSample], max_tokens: int) -> list[list[TrainingSample]]:
    groups: list[list[TrainingSample]] = []
    used = 0
    for members in _by_unit(items).values():
        length = sum(len(item.sample.input_ids) for item in members)
        if groups and used + length <= max_tokens:
            groups[-1].extend(members)
            used += length
        else:
            groups.append(list(members))
            used = length
    return groups


@dataclass(frozen=True)
class MicroBatch:
    """The K trained tokens of S samples after one forward pass.

    ``logprobs`` (with gradient) and ``entropies`` (with one where there is an entropy bonus): [K], in the order of the
    samples; ``weights``: [S], the weight of a token of each sample in the optimiser batch.
    """

    items: Sequence[TrainingSample]
    logprobs: Tensor
    entropies: Tensor
    weights: Tensor

    @property
    def sequence(self) -> Tensor:
        """[K]: the index of each token's sample."""
        counts = torch.tensor([len(item.positions) for item in self.items], device=self.logprobs.device)
        return torch.repeat_interleave(torch.arange(len(self.items), device=counts.device), counts)

    def tokens(self, name: str) -> Tensor:
        """[K]: a field of all samples, concatenated."""
        return torch.cat([getattr(item, name) for item in self.items]).to(self.logprobs.device)


class Loss:
    """The loss of a call. Those of the micro-batches of an optimiser batch add up to that of the batch.

    - imitation: the cross-entropy of the sampled tokens, in nats; advantages are ignored.
    - reinforcement: ``correction * (objective + kl_coefficient * kl) - entropy_coefficient * entropy`` of each token: a
      clipped policy gradient, the importance correction of stale tokens, and a KL term. The samples of a call have a
      teacher's logprobs all, or none has. The bonus is the exact entropy of the next-token distribution (Mnih et al.
      2016, arXiv 1602.01783; verl's ``entropy_coeff``), which is not corrected for stale tokens.
    - preference: the mean over pairs of ``-log sigmoid(beta * margin)`` (DPO, Rafailov et al. 2023, arXiv 2305.18290);
      the reference is the policy that training started from.

    ``kind``: that of the settings' algorithm, unless another one is given.
    """

    def __init__(self, settings: TrainingSettings, kind: Kind | None = None) -> None:
        self.kind: Kind = kind or algorithm_of(settings).kind
        # The fallback from reinforcement learning to SFT keeps the settings; their aggregation is not meant for SFT.
        self.settings = settings.model_copy(update={"algorithm": "sft"}) if self.kind == "imitation" else settings
        self.whole_units = self.kind == "preference"
        """Whether the samples of a unit must be in one micro-batch."""
        self.needs_reference = self.kind == "reinforcement" and settings.kl != "none"
        """Whether ``TrainingSample.reference`` must be set, the base model's logprobs."""

    @property
    def old_logprobs(self) -> OldLogprobs:
        """Whose logprobs ``TrainingSample.old`` are: recorded when sampling, or recomputed by the policy before the
        first step; "auto": recomputed where the recorded ones differ from the policy's by more than the clip's
        bounds."""
        if self.kind == "reinforcement":
            return old_logprobs_of(self.settings)
        return "recomputed" if self.kind == "preference" else "recorded"

    def weights(self, batch: Sequence[TrainingSample]) -> Tensor:
        """[S]: the weight of a token of each sample of an optimiser batch: as ``aggregation`` says, and that of every
        pair is the same."""
        if self.kind == "preference":
            return torch.full((len(batch),), 1.0 / len({item.unit for item in batch}))
        return batch_weights(batch, self.settings)

    def counts(self, item: TrainingSample) -> bool:
        """Whether the sample has a gradient; others are part of the weights, but need no forward pass."""
        in_loss = self.needs_reference or item.teacher is not None or self.settings.entropy_coefficient > 0
        return self.kind != "reinforcement" or in_loss or bool(item.advantages.any())

    def __call__(self, one: MicroBatch) -> tuple[Tensor, dict[str, float]]:
        """The micro-batch's share of the batch's loss, with gradient, and its ``SUMS``."""
        if self.kind == "reinforcement":
            return self._policy_gradient(one)
        imitates = self.kind == "imitation"
        loss = -(one.weights[one.sequence] * one.logprobs).sum() if imitates else self._preference(one)
        count = float(one.logprobs.numel())
        known = {"tokens": count, "ratio": count, "weight": count, "entropy": one.entropies.sum().item()}
        return loss, dict.fromkeys(SUMS, 0.0) | known

    def _policy_gradient(self, one: MicroBatch) -> tuple[Tensor, dict[str, float]]:
        chosen, objective = self.settings, algorithm_of(self.settings).objective
        low, high = clip_bounds(chosen)
        old, recorded, divergence = one.tokens("old"), one.tokens("recorded"), 0.0
        tokens = TokenBatch(one.logprobs, old, one.tokens("advantages"), one.sequence, len(one.items))
        correction = torch.ones_like(old)
        if chosen.correction != "none":
            correction = correction_weights(tokens, recorded, high=chosen.correction_high)
        losses = _OBJECTIVES[objective](tokens, low=low, high=high) * correction
        if self.needs_reference:
            kl = kl_loss(tokens, one.tokens("reference"))
            losses = losses + chosen.kl_coefficient * correction * kl
            divergence = kl.detach().sum().item()
        current = one.logprobs.detach()
        if one.items[0].teacher is not None:
            divergence = (current - one.tokens("teacher")).sum().item()
        if chosen.entropy_coefficient:
            losses = losses - chosen.entropy_coefficient * one.entropies
        difference = tokens.mean_of_sequence(current - old) if objective == "gspo" else current - old
        found = diagnose(tokens, one.entropies, ratio=torch.exp(difference), low=low, high=high)
        found |= {"drift": (current - recorded).abs().sum().item(), "kl": divergence, "weight": correction.sum().item()}
        return (one.weights[one.sequence] * losses).sum(), found

    def _preference(self, one: MicroBatch) -> Tensor:
        pairs = {unit: at for at, unit in enumerate(dict.fromkeys(item.unit for item in one.items))}
        pair = one.logprobs.new_tensor([pairs[item.unit] for item in one.items], dtype=torch.int64)[one.sequence]
        chosen = one.logprobs.new_tensor([item.chosen for item in one.items], dtype=torch.bool)[one.sequence]
        parts = [
            values.new_zeros(len(pairs)).index_add(0, pair[wanted], values[wanted])
            for values in (one.logprobs, one.tokens("old"))
            for wanted in (chosen, ~chosen)
        ]
        return preference(*parts, beta=self.settings.dpo_beta).sum() * one.weights[0]


_OBJECTIVES = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def batch_weights(batch: Sequence[TrainingSample], settings: TrainingSettings) -> Tensor:
    """[S]: the weight of a token of each sample, from all samples of an optimiser batch.

    A sample that stands for ``count`` equal ones has the weight of them all.
    """
    counts = torch.tensor([float(item.sample.count) for item in batch])
    lengths = counts * torch.tensor([float(len(item.positions)) for item in batch])
    units = {unit: at for at, unit in enumerate(dict.fromkeys(item.unit for item in batch))}
    rollout = torch.tensor([units[item.unit] for item in batch], dtype=torch.int64)
    match aggregation_of(settings):
        case "token":
            return counts * token_mean(lengths)
        case "fixed":
            longest = int(tokens_per_rollout(lengths, rollout).max())
            return counts * fixed_length(lengths, longest, len(units))
        case "sequence":
            # The papers' sequence is a rollout's whole output, which a rewritten history cuts into several.
            return counts * rollout_mean(lengths, rollout)
