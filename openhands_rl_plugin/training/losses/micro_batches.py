"""Optimiser batches and micro-batches of training samples."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.data.batch import pack
from openhands_rl_plugin.training.data.imitation import PreferencePair

BatchOrder = Literal["shuffled", "prefix"]


@dataclass(eq=False)
class TrainingSample:
    """A sample and its K trained tokens; all tensors [K] float32, on the CPU.

    ``recorded``: logprobs at sampling. ``old``: the old policy's logprobs, the denominator of the importance ratio (for
    DPO, the reference model's). ``reference``: the base model's logprobs, for the KL term. ``unit``: the index of the
    rollout or pair; samples of a unit are in the same optimiser batch. ``chosen``: whether it is the chosen completion.
    ``temperatures``: what the trainer divides the logits by, ``None`` for 1: those that were sampled at.
    """

    sample: Sample
    unit: int
    chosen: bool = False
    positions: tuple[int, ...] = ()
    recorded: Tensor = field(default_factory=lambda: torch.empty(0))
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))
    old: Tensor = field(default_factory=lambda: torch.empty(0))
    reference: Tensor | None = None
    temperatures: Tensor | None = None

    def __post_init__(self) -> None:
        sample = self.sample
        self.positions = tuple(at for at, sampled in enumerate(sample.mask) if sampled)
        self.recorded = torch.tensor([sample.logprobs[at] for at in self.positions])
        self.advantages = torch.tensor([sample.advantage_at(at) for at in self.positions])
        self.old = self.recorded


def samples_from_rollouts(samples: Sequence[Sample], *, as_sampled: bool = False) -> list[TrainingSample]:
    """Training samples of rollouts; a unit is a trajectory.

    ``as_sampled``: reinforce the distributions at the temperatures of sampling; imitation wants that of temperature 1.
    """
    units: dict[str, int] = {}
    items = [TrainingSample(sample, units.setdefault(sample.trajectory_id, len(units))) for sample in samples]
    for item in items if as_sampled else ():
        temperatures = torch.tensor([item.sample.temperature_at(at) for at in item.positions])
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
    order = sorted(by_unit, key=lambda unit: by_unit[unit][0].sample.input_ids)
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
