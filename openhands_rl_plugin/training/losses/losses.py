"""The loss of a micro-batch, by the algorithm that the settings name: token losses or preference losses."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Literal, Protocol

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.arrays import Floats, Ids
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.algorithms import (
    OldLogprobs,
    aggregation_of,
    algorithm_of,
    clip_bounds,
    old_logprobs_of,
)
from openhands_rl_plugin.training.data.batch import pack
from openhands_rl_plugin.training.data.imitation import PreferencePair
from openhands_rl_plugin.training.losses import objectives
from openhands_rl_plugin.training.losses.logprobs import Diagnostics, diagnose
from openhands_rl_plugin.training.losses.objectives import TokenBatch

BatchOrder = Literal["shuffled", "prefix"]


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


def batches(
    items: Sequence[TrainingSample], *, size: int, epochs: int, seed: str, order: BatchOrder = "shuffled"
) -> list[list[TrainingSample]]:
    """Optimiser batches of all epochs: ``size`` units each, in a new order every epoch.

    With ``"prefix"``, units with a common prefix, such as the rollouts of a group, are in the same batches, and only
    the batches are shuffled: a shared prefix is computed once a batch.
    """
    by_unit: dict[int, list[TrainingSample]] = {}
    for item in items:
        by_unit.setdefault(item.unit, []).append(item)
    make = _by_prefix if order == "prefix" else _shuffled
    made: list[list[TrainingSample]] = []
    for epoch in range(epochs):
        for units in make(by_unit, size, random.Random(f"{seed}:{epoch}")):
            made.append([item for unit in units for item in by_unit[unit]])
    return made


def _shuffled(by_unit: Mapping[int, Sequence[TrainingSample]], size: int, source: random.Random) -> list[list[int]]:
    order = list(by_unit)
    source.shuffle(order)
    return [order[start : start + size] for start in range(0, len(order), size)]


def _by_prefix(by_unit: Mapping[int, Sequence[TrainingSample]], size: int, source: random.Random) -> list[list[int]]:
    order = sorted(by_unit, key=lambda unit: bytes(by_unit[unit][0].sample.input_ids))
    # The first unit differs in every epoch, or the same units would always be in one batch.
    begin = source.randrange(len(order)) if order else 0
    order = order[begin:] + order[:begin]
    made = [order[start : start + size] for start in range(0, len(order), size)]
    source.shuffle(made)
    return made


def micro_batches(items: Sequence[TrainingSample], max_tokens: int, *, whole_units: bool) -> list[list[TrainingSample]]:
    """Micro-batches of at most ``max_tokens`` rows; ``whole_units`` keeps a unit in one, however long it is."""
    if whole_units:
        return _micro_batches_of_units(items, max_tokens)
    by_sample = {id(item.sample): item for item in items}
    return [[by_sample[id(sample)] for sample in group] for group in pack([item.sample for item in items], max_tokens)]


def _micro_batches_of_units(items: Sequence[TrainingSample], max_tokens: int) -> list[list[TrainingSample]]:
    by_unit: dict[int, list[TrainingSample]] = {}
    for item in items:
        by_unit.setdefault(item.unit, []).append(item)
    groups: list[list[TrainingSample]] = []
    used = 0
    for members in by_unit.values():
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

    def tokens(self, parts: Sequence[Tensor]) -> Tensor:
        """[K]: one tensor per sample, concatenated."""
        return torch.cat(list(parts)).to(self.logprobs.device)


class MicroBatchLoss(Protocol):
    """A loss with gradient accumulation: the losses of a batch's micro-batches add up to the loss of the batch."""

    whole_units: bool
    """Whether the samples of a unit must be in one micro-batch."""

    old_logprobs: OldLogprobs
    """Whose logprobs ``TrainingSample.old`` are: recorded when sampling, or recomputed by the policy before the first
    step; "auto": recomputed where the recorded ones differ from the policy's by more than the clip's bounds."""

    needs_reference: bool
    """Whether ``TrainingSample.reference`` must be set, the base model's logprobs."""

    def weights(self, batch: Sequence[TrainingSample]) -> Tensor:
        """[S]: the weight of a token of each sample of an optimiser batch."""
        ...

    def counts(self, item: TrainingSample) -> bool:
        """Whether the sample has a gradient; others are part of the weights, but need no forward pass."""
        ...

    def __call__(self, one: MicroBatch) -> tuple[Tensor, Diagnostics]:
        """The micro-batch's share of the batch's loss, with gradient."""
        ...


class Imitation:
    """Negative log-likelihood (supervised fine-tuning)."""

    whole_units = needs_reference = False
    old_logprobs: OldLogprobs = "recorded"

    def __init__(self, settings: TrainingSettings) -> None:
        # The fallback from reinforcement learning to SFT keeps the settings; their aggregation is not meant for SFT.
        self._settings = settings.model_copy(update={"algorithm": "sft"})

    def weights(self, batch: Sequence[TrainingSample]) -> Tensor:
        """As ``aggregation`` says."""
        return batch_weights(batch, self._settings)

    def counts(self, item: TrainingSample) -> bool:
        """Always: advantages are ignored."""
        return True

    def __call__(self, one: MicroBatch) -> tuple[Tensor, Diagnostics]:
        """The mean over the sampled tokens, in nats."""
        loss = -(one.weights[one.sequence] * one.logprobs).sum()
        return loss, Diagnostics(tokens=one.logprobs.numel(), entropy=one.entropies.mean().item())


class Reinforcement:
    """A policy gradient: the clipped objective, the KL term, the importance correction of stale tokens, and the entropy
    bonus.

    The samples of a call have a teacher's logprobs all, or none has.

    The bonus is the exact entropy of the next-token distribution at each trained token, weighted like its loss (Mnih et
    al. 2016, arXiv 1602.01783; verl's ``entropy_coeff``). It is not corrected for stale tokens.
    """

    whole_units = False

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings = settings
        self._objective = algorithm_of(settings).objective
        self._low, self._high = clip_bounds(settings)
        self.old_logprobs: OldLogprobs = old_logprobs_of(settings)
        self.needs_reference = settings.kl != "none"
        self._kl_in_loss = settings.kl != "none" and settings.kl_in == "loss"

    def weights(self, batch: Sequence[TrainingSample]) -> Tensor:
        """As ``aggregation`` says."""
        return batch_weights(batch, self._settings)

    def counts(self, item: TrainingSample) -> bool:
        """With an advantage other than zero, or a KL term, a teacher or an entropy bonus in the loss."""
        in_loss = self._kl_in_loss or item.teacher is not None or self._settings.entropy_coefficient > 0
        return in_loss or bool(item.advantages.any())

    def __call__(self, one: MicroBatch) -> tuple[Tensor, Diagnostics]:
        """``sum(weights * (correction * (objective + kl_coefficient * kl) - entropy_coefficient * entropy))``."""
        tokens = _token_batch(one)
        recorded = one.tokens([item.recorded for item in one.items])
        correction = correction_of(self._settings, tokens, recorded)
        losses = self._losses(tokens) * correction
        divergence = 0.0
        if self._kl_in_loss and self._settings.kl != "none":
            reference = one.tokens([item.reference for item in one.items if item.reference is not None])
            kl = objectives.kl_loss(tokens, reference, self._settings.kl)
            losses = losses + self._settings.kl_coefficient * correction * kl
            divergence = kl.detach().mean().item()
        if taught := [item.teacher for item in one.items if item.teacher is not None]:
            divergence = (tokens.logprobs.detach() - one.tokens(taught)).mean().item()
        if self._settings.entropy_coefficient:
            losses = losses - self._settings.entropy_coefficient * one.entropies
        diagnostics = self._diagnose(tokens, one.entropies, recorded, divergence, correction)
        return (one.weights[one.sequence] * losses).sum(), diagnostics

    def _losses(self, tokens: TokenBatch) -> Tensor:
        match self._objective:
            case "gspo":
                return objectives.gspo(tokens, low=self._low, high=self._high)
            case "cispo":
                return objectives.cispo(tokens, low=self._low, high=self._high)
            case _:
                return objectives.ppo(tokens, low=self._low, high=self._high)

    def _diagnose(
        self, tokens: TokenBatch, entropies: Tensor, recorded: Tensor, divergence: float, correction: Tensor
    ) -> Diagnostics:
        found = diagnose(tokens, entropies, ratio=self._ratio(tokens), low=self._low, high=self._high)
        drift = (tokens.logprobs.detach() - recorded).abs().mean().item()
        return replace(found, drift=drift, kl=divergence, weight=correction.mean().item())

    def _ratio(self, tokens: TokenBatch) -> Tensor:
        """[K]: the importance ratio that is clipped."""
        difference = (tokens.logprobs - tokens.old).detach()
        return torch.exp(tokens.mean_of_sequence(difference) if self._objective == "gspo" else difference)


class Preference:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290); the reference is the policy that training started from."""

    whole_units = True
    needs_reference = False
    old_logprobs: OldLogprobs = "recomputed"

    def __init__(self, settings: TrainingSettings) -> None:
        self._beta = settings.dpo_beta

    def weights(self, batch: Sequence[TrainingSample]) -> Tensor:
        """Every pair has the same weight."""
        return torch.full((len(batch),), 1.0 / len({item.unit for item in batch}))

    def counts(self, item: TrainingSample) -> bool:
        """Always."""
        return True

    def __call__(self, one: MicroBatch) -> tuple[Tensor, Diagnostics]:
        """The mean over pairs of ``-log sigmoid(beta * margin)``."""
        pairs = {unit: at for at, unit in enumerate(dict.fromkeys(item.unit for item in one.items))}
        pair = one.logprobs.new_tensor([pairs[item.unit] for item in one.items], dtype=torch.int64)[one.sequence]
        chosen = one.logprobs.new_tensor([item.chosen for item in one.items], dtype=torch.bool)[one.sequence]
        old = one.tokens([item.old for item in one.items])

        def total(values: Tensor, wanted: Tensor) -> Tensor:
            return values.new_zeros(len(pairs)).index_add(0, pair[wanted], values[wanted])

        losses = objectives.preference(
            total(one.logprobs, chosen),
            total(one.logprobs, ~chosen),
            total(old, chosen),
            total(old, ~chosen),
            beta=self._beta,
        )
        entropy = one.entropies.mean().item()
        return losses.sum() * one.weights[0], Diagnostics(tokens=one.logprobs.numel(), entropy=entropy)


def _token_batch(one: MicroBatch) -> TokenBatch:
    return TokenBatch(
        logprobs=one.logprobs,
        old=one.tokens([item.old for item in one.items]),
        advantages=one.tokens([item.advantages for item in one.items]),
        sequence=one.sequence,
        sequences=len(one.items),
    )


def correction_of(settings: TrainingSettings, tokens: TokenBatch, recorded: Tensor) -> Tensor:
    """[K]: the importance weights of the old policy's tokens, as the settings correct what another one sampled."""
    return objectives.correction_weights(
        tokens,
        recorded,
        mode=settings.correction,
        level=settings.correction_level,
        low=settings.correction_low,
        high=settings.correction_high,
    )


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
            return counts * objectives.token_mean(lengths)
        case "fixed":
            longest = int(objectives.tokens_per_rollout(lengths, rollout).max())
            return counts * objectives.fixed_length(lengths, settings.fixed_length or longest, len(units))
        case "sequence" | "rollout":
            # The papers' sequence is a rollout's whole output, which a rewritten history cuts into several.
            return counts * objectives.rollout_mean(lengths, rollout)
