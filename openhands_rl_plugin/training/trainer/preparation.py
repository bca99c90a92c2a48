"""Preparation of the samples before the first step: checks, and logprobs of the old and the reference policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.credit.estimators import whiten
from openhands_rl_plugin.training.data.imitation import PreferencePair
from openhands_rl_plugin.training.data.layout import lay_out
from openhands_rl_plugin.training.distributed.ranks import Ranks, shard_micro_batches
from openhands_rl_plugin.training.losses.losses import TrainingSample, temperatures_of
from openhands_rl_plugin.training.losses.objectives import kl_penalty
from openhands_rl_plugin.training.policies.trained_policy import TrainedPolicy

_ROUNDING = 1e-5
"""What is left of float32 advantages that add up to zero, as a share of their absolute values."""


def check_samples(samples: Sequence[Sample], *, longest: int, vocabulary: int) -> None:
    """Raise ``TrainingError`` for the first sample that a model of these sizes cannot be trained on."""
    if not samples:
        raise TrainingError("there is nothing to train on: no samples were given")
    for sample in samples:
        where, length = f"trajectory {sample.trajectory_id}", len(sample.input_ids)
        if not (length == len(sample.mask) == len(sample.logprobs)) or True not in sample.mask[1:]:
            raise TrainingError(f"{where}: a sample needs a mask and a logprob for each token, and a sampled token")
        if sample.mask[0]:
            raise TrainingError(f"{where}: the first token has no context, so it cannot have been sampled")
        if length > longest:
            raise TrainingError(
                f"{where}: {length} tokens, but the model is made for {longest}; lower max_prompt_length"
            )
        if min(sample.input_ids) < 0 or max(sample.input_ids) >= vocabulary:
            raise TrainingError(f"{where}: a token id is not in the model's vocabulary; was it another model's?")


def check_sampled(samples: Sequence[Sample]) -> None:
    """Raise ``TrainingError`` for the first sample that was sampled greedily, which has no probability to reinforce."""
    for sample in samples:
        if min(sample.temperature, *sample.token_temperatures, 1.0) <= 0:
            raise TrainingError(
                f"trajectory {sample.trajectory_id}: sampled at temperature 0, where every answer has probability 1; "
                'roll out at another temperature, or train with algorithm = "sft", "rejection-sampling" or "dpo"'
            )


def check_pairs(pairs: Sequence[PreferencePair], *, packed: bool, sharded: bool) -> None:
    """Raise ``TrainingError`` where ranks would make different numbers of forward passes, and wait for each other.

    A pair is in one micro-batch: a model that is not packed makes as many passes as the pair has sequences.
    """
    if sharded and not packed and len({len(pair.chosen) + len(pair.rejected) for pair in pairs}) > 1:
        raise TrainingError(
            "this model computes one sequence at a time, and these pairs have different numbers of sequences, so that "
            'processes with sharded layers would wait for each other for ever: set [rl.training] sharding = "none"'
        )


def trained_tokens(items: Sequence[TrainingSample]) -> list[tuple[int, int]]:
    """Pairs (index of the sample, position) of the sampled tokens of a micro-batch, sample by sample."""
    return [(number, at) for number, item in enumerate(items) for at in item.positions]


def micro_batch_logprobs(
    policy: TrainedPolicy, group: Sequence[TrainingSample], *, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the trained tokens of a micro-batch, at their temperatures; else at temperature 1."""
    layout = lay_out([item.sample.input_ids for item in group])
    return policy.logprobs(layout, trained_tokens(group), temperatures_of(group) if scaled else None)


@torch.no_grad()
def policy_logprobs(
    policy: TrainedPolicy, items: Sequence[TrainingSample], max_tokens: int, ranks: Ranks, *, scaled: bool = True
) -> list[Tensor]:
    """The policy's logprobs of the trained tokens of each sample, in order, on the CPU. ``scaled``: by temperature."""
    found = {id(item): torch.zeros(len(item.positions)) for item in items}
    mine, idle = shard_micro_batches(ranks, items, max_tokens, whole_units=False)
    for number, group in enumerate((*mine, *idle)):
        logprobs, _ = micro_batch_logprobs(policy, group, scaled=scaled)
        if number < len(mine):
            parts = torch.split(logprobs.cpu(), [len(item.positions) for item in group])
            found.update({id(item): part for item, part in zip(group, parts, strict=True)})
    ranks.all_reduce([found[id(item)] for item in items])
    return [found[id(item)] for item in items]


def subtract_divergence(items: Sequence[TrainingSample], settings: TrainingSettings) -> None:
    """Subtract from each advantage ``kl_coefficient`` times the KL divergence summed over the rest of the sequence.

    This is the return to go of a reward of ``-kl_coefficient * kl`` per token, as in OpenRLHF. Algorithms that whiten
    do so afterwards.
    """
    assert settings.kl != "none"
    for item in items:
        assert item.reference is not None
        penalty = settings.kl_coefficient * kl_penalty(item.old, item.reference, settings.kl)
        item.advantages = item.advantages - penalty.flip(0).cumsum(0).flip(0)
    if algorithm_of(settings).estimator.whitened:
        values = torch.cat([item.advantages for item in items]).tolist()
        counts = [item.sample.count for item in items for _ in item.positions]
        whitened = torch.tensor(whiten(values, counts, variance=settings.variance))
        for item, part in zip(items, torch.split(whitened, [len(item.positions) for item in items]), strict=True):
            item.advantages = part


def scale_negative_advantages(items: Sequence[TrainingSample], weights: Sequence[float], negative_scale: float) -> None:
    """Multiply negative advantages by ``negative_scale``, after what samples have in common was weighed up.

    A negative advantage moves probability from a sampled action to all others, most of them never tried; a positive one
    moves it to an action that worked. With few samples per task a larger weight of positive ones is the safer update
    (Arnal et al. 2025, arXiv 2506.20520, who lower the baseline for this purpose).

    That is so of what samples differ in. A token that several have after the same ones (the answers of a group begin
    alike) is one action with one gradient, and its advantage the sum of theirs. Scaled sample by sample, the sum would
    be positive where it was zero: with every group the form that all answers have would become likelier. So the sum
    goes first, to the samples whose advantages have its sign, in proportion, and the others have none there.

    ``weights``: of a token of each sample in the loss.
    """
    keys = [_contexts(item) for item in items]
    sums: dict[int, list[float]] = {}
    for item, weight, contexts in zip(items, weights, keys, strict=True):
        for context, advantage in zip(contexts, item.advantages.tolist(), strict=True):
            both = sums.setdefault(context, [0.0, 0.0])
            both[advantage < 0] += weight * advantage
    shares = {context: _shares(*both) for context, both in sums.items()}
    scales = torch.tensor([1.0, negative_scale])
    for item, contexts in zip(items, keys, strict=True):
        positive, negative = (torch.tensor([shares[context] for context in contexts]) * scales).unbind(1)
        item.advantages = item.advantages * torch.where(item.advantages < 0, negative, positive)


def _shares(positive: float, negative: float) -> tuple[float, float]:
    """The shares of the positive and of the negative advantages that are left when they are added up."""
    total = positive + negative
    if abs(total) <= _ROUNDING * (positive - negative):
        return 0.0, 0.0
    return (total / positive, 0.0) if total > 0 else (0.0, total / negative)


def _contexts(item: TrainingSample) -> list[int]:
    """For each trained token a hash of it and all tokens before it."""
    found: list[int] = []
    context = 0
    for token, trained in zip(item.sample.input_ids, item.sample.mask, strict=True):
        context = hash((context, token))
        if trained:
            found.append(context)
    return found


def newest_version(samples: Sequence[Sample], known: int) -> int:
    """The newest of ``known`` and the versions that sampled the samples."""
    return max(known, *map(version_of, samples))


def staleness(samples: Sequence[Sample], newest: int) -> float:
    """Mean number of versions between the newest one and the one that sampled (base model: version 0)."""
    return sum(newest - version_of(sample) for sample in samples) / len(samples)


def version_of(sample: Sample) -> int:
    """The version that sampled it; 0 is the base model."""
    return (sample.policy.version if sample.policy is not None else None) or 0
