"""Samples into optimiser batches and micro-batches, and the loss of one, by the algorithm that the settings name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Literal

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
        self._kl_in_loss = self.needs_reference and settings.kl_in == "loss"

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
        in_loss = self._kl_in_loss or item.teacher is not None or self.settings.entropy_coefficient > 0
        return self.kind != "reinforcement" or in_loss or bool(item.advantages.any())

    def __call__(self, one: MicroBatch) -> tuple[Tensor, Diagnostics]:
        """The micro-batch's share of the batch's loss, with gradient."""
        if self.kind == "reinforcement":
            return self._policy_gradient(one)
        imitates = self.kind == "imitation"
        loss = -(one.weights[one.sequence] * one.logprobs).sum() if imitates else self._preference(one)
        return loss, Diagnostics(tokens=one.logprobs.numel(), entropy=one.entropies.mean().item())

    def _policy_gradient(self, one: MicroBatch) -> tuple[Tensor, Diagnostics]:
        chosen, objective = self.settings, algorithm_of(self.settings).objective
        low, high = clip_bounds(chosen)
        old, recorded, divergence = one.tokens("old"), one.tokens("recorded"), 0.0
        tokens = TokenBatch(one.logprobs, old, one.tokens("advantages"), one.sequence, len(one.items))
        correction = objectives.correction_weights(
            tokens,
            recorded,
            mode=chosen.correction,
            level=chosen.correction_level,
            low=chosen.correction_low,
            high=chosen.correction_high,
        )
        losses = _OBJECTIVES[objective](tokens, low=low, high=high) * correction
        if self._kl_in_loss and chosen.kl != "none":
            kl = objectives.kl_loss(tokens, one.tokens("reference"), chosen.kl)
            losses = losses + chosen.kl_coefficient * correction * kl
            divergence = kl.detach().mean().item()
        current = one.logprobs.detach()
        if one.items[0].teacher is not None:
            divergence = (current - one.tokens("teacher")).mean().item()
        if chosen.entropy_coefficient:
            losses = losses - chosen.entropy_coefficient * one.entropies
        difference = tokens.mean_of_sequence(current - old) if objective == "gspo" else current - old
        found = diagnose(tokens, one.entropies, ratio=torch.exp(difference), low=low, high=high)
        drift, weight = (current - recorded).abs().mean().item(), correction.mean().item()
        return (one.weights[one.sequence] * losses).sum(), replace(found, drift=drift, kl=divergence, weight=weight)

    def _preference(self, one: MicroBatch) -> Tensor:
        pairs = {unit: at for at, unit in enumerate(dict.fromkeys(item.unit for item in one.items))}
        pair = one.logprobs.new_tensor([pairs[item.unit] for item in one.items], dtype=torch.int64)[one.sequence]
        chosen = one.logprobs.new_tensor([item.chosen for item in one.items], dtype=torch.bool)[one.sequence]
        parts = [
            values.new_zeros(len(pairs)).index_add(0, pair[wanted], values[wanted])
            for values in (one.logprobs, one.tokens("old"))
            for wanted in (chosen, ~chosen)
        ]
        return objectives.preference(*parts, beta=self.settings.dpo_beta).sum() * one.weights[0]


_OBJECTIVES = {"ppo": objectives.ppo, "gspo": objectives.gspo, "cispo": objectives.cispo}


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
