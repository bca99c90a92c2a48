"""The denominator of the importance ratio: logprobs recorded when sampling, or recomputed before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.algorithms import algorithm_of, clip_bounds
from openhands_rl_plugin.training.credit.estimators import whiten
from openhands_rl_plugin.training.data.imitation import PreferencePair
from openhands_rl_plugin.training.data.layout import lay_out
from openhands_rl_plugin.training.distributed.ranks import Ranks, shard_micro_batches
from openhands_rl_plugin.training.losses.losses import Loss, TrainingSample, temperatures_of
from openhands_rl_plugin.training.losses.objectives import kl_penalty
from openhands_rl_plugin.training.policies.packed_model import PackedModel


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
        if max(sample.input_ids) >= vocabulary:
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


def micro_batch_logprobs(
    policy: PackedModel, group: Sequence[TrainingSample], *, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the trained tokens of a micro-batch, at their temperatures; else at temperature 1."""
    wanted = [(number, at) for number, item in enumerate(group) for at in item.positions]
    layout = lay_out([item.sample.input_ids for item in group])
    return policy.logprobs(layout, wanted, temperatures_of(group) if scaled else None)


@torch.no_grad()
def policy_logprobs(
    policy: PackedModel, items: Sequence[TrainingSample], max_tokens: int, ranks: Ranks, *, scaled: bool = True
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
        whitened = torch.tensor(whiten(values, counts))
        for item, part in zip(items, torch.split(whitened, [len(item.positions) for item in items]), strict=True):
            item.advantages = part


def subtract_teacher(items: Sequence[TrainingSample], settings: TrainingSettings) -> None:
    """Subtract from each token's advantage ``opd_weight`` times its part of KL(policy || teacher), ``old - teacher``.

    The policy gradient is then that of the divergence at each sampled token, clipped as that of a reward is.
    """
    for item in items:
        if item.teacher is not None:
            item.advantages = item.advantages - settings.opd_weight * (item.old - item.teacher)


def newest_version(samples: Sequence[Sample], known: int) -> int:
    """The newest of ``known`` and the versions that sampled the samples."""
    return max(known, *map(version_of, samples))


def staleness(samples: Sequence[Sample], newest: int) -> float:
    """Mean number of versions between the newest one and the one that sampled (base model: version 0)."""
    return sum(newest - version_of(sample) for sample in samples) / len(samples)


def version_of(sample: Sample) -> int:
    """The version that sampled it; 0 is the base model."""
    return (sample.policy.version if sample.policy is not None else None) or 0


log = redacting_logger(__name__)

_SAVED = {"old": "old.logprobs", "recorded": "old.recorded"}
"""What of a ``TrainingSample`` a checkpoint keeps, by its name there."""

_UNSCALED = (
    "the recorded logprobs are those of temperature 1, but the answers were sampled at another one: start vLLM with "
    "--logprobs-mode processed_logprobs (SGLang: without SGLANG_RETURN_ORIGINAL_LOGPROB), or roll out at temperature 1"
)


def set_old_logprobs(
    policy: PackedModel,
    loss: Loss,
    items: Sequence[TrainingSample],
    epoch: Sequence[Sequence[TrainingSample]],
    ranks: Ranks,
    *,
    version: int,
    limit: int,
) -> bool:
    """Decide whose logprobs ``TrainingSample.old`` are, and set them, before the first step of a call.

    They are recomputed where the settings say so, and by default where the recorded ones differ by more than the clip's
    bounds. What an older version sampled keeps the recorded ones then: recomputed, its ratio would be 1, as if the
    policy had not moved since. A correction weighs it by both instead.

    Args:
        policy: the one to train.
        loss: that of the call.
        items: all samples of the call.
        epoch: the optimiser batches of the first epoch, which hold all items.
        ranks: the processes that train together.
        version: the one that the policy starts from: what it sampled itself shows how far two engines differ.
        limit: tokens of a micro-batch.

    Returns whether any are recomputed. Raises ``TrainingError`` where the recorded ones are of another distribution,
    and the settings need them.
    """
    settings = loss.settings
    in_reward = settings.kl != "none" and settings.kl_in == "reward"  # it gives all samples an advantage
    live = [item for item in items if in_reward or loss.counts(item)]

    def difference(some: Sequence[TrainingSample], *, scaled: bool = True) -> float:
        """Mean absolute difference, in nats, of the recorded logprobs of one micro-batch of ``some`` from ours."""
        sums = accumulate(len(item.sample.input_ids) for item in some)
        some = some[: max(1, sum(size <= settings.max_tokens_per_micro_batch for size in sums))]
        own = policy_logprobs(policy, some, limit, ranks, scaled=scaled)
        return torch.cat([now - item.recorded for item, now in zip(some, own, strict=True)]).abs().mean().item()

    # vLLM (by default) and `openhands-rl serve` report logprobs of temperature 1, and no server says so.
    heated = [item for item in items if item.temperatures is not None]
    unscaled = bool(heated) and difference(heated, scaled=False) < difference(heated)
    if unscaled and (settings.correction != "none" or settings.old_logprobs == "recorded"):
        raise TrainingError(f'a correction and old_logprobs = "recorded" need them as they were sampled: {_UNSCALED}')
    choice = loss.old_logprobs
    if choice == "auto":
        own = [item for item in items if version_of(item.sample) == version]
        choice = "recomputed" if own and difference(own) > _log_bound(settings) else "recorded"
    if choice == "recorded" and not unscaled:
        return False
    stale: list[TrainingSample] = []
    if loss.kind == "reinforcement" and settings.correction == "none":
        stale = [item for item in live if version_of(item.sample) != version]
    if stale:
        log.warning(
            "%d of %d samples are of other versions than the one that is trained: set [rl.training] correction = "
            '"truncate" (at temperature 1, or with --logprobs-mode processed_logprobs)',
            len(stale),
            len(live),
        )
    kept = set(map(id, () if unscaled or settings.old_logprobs == "recomputed" else stale))
    if len(kept) == len(live):
        return False
    among = set(map(id, live))
    for batch in epoch:
        # In the groups that the step will make of them: bfloat16 rounds by the shapes, by more than GSPO's bounds.
        group = [item for item in batch if id(item) in among]
        if not all(id(item) in kept for item in group):
            for item, values in zip(group, policy_logprobs(policy, group, limit, ranks), strict=True):
                if id(item) not in kept:
                    item.old = values
    if unscaled:
        scaled = [item for item in live if item.temperatures is not None]
        for item, values in zip(scaled, policy_logprobs(policy, scaled, limit, ranks, scaled=False), strict=True):
            # For the drift only, which so compares the two engines at temperature 1.
            item.recorded = item.old + item.recorded - values
    return True


def saved_logprobs(items: Sequence[TrainingSample]) -> dict[str, Tensor]:
    """The recomputed old logprobs and the corrected recorded ones, for a checkpoint."""
    return {name: torch.cat([getattr(item, field) for item in items]) for field, name in _SAVED.items()}


def take_logprobs(items: Sequence[TrainingSample], tensors: dict[str, Tensor]) -> bool:
    """Move what ``saved_logprobs`` gave from a checkpoint's ``tensors`` to the samples; whether there was any."""
    found = {field: tensors.pop(name) for field, name in _SAVED.items() if name in tensors}
    for field, values in found.items():
        for item, part in zip(items, torch.split(values, [len(item.positions) for item in items]), strict=True):
            setattr(item, field, part)
    return bool(found)


def _log_bound(settings: TrainingSettings) -> float:
    """The nearer of the clip's bounds, as a log ratio."""
    low, high = clip_bounds(settings)
    return min(math.log1p(high), -math.log1p(-low) if low < 1 else math.inf)
