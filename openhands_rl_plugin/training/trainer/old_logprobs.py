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


class OldLogprobs:
    """Decides whose logprobs ``TrainingSample.old`` are and sets them, before the first step of a call.

    What an older version sampled keeps the recorded ones where they are recomputed for the rest: recomputed, its ratio
    would be 1, as if the policy had not moved since. A correction weighs it by both instead.

    ``version``: the one that the policy starts from: only what it sampled itself shows how far two engines differ.
    ``limit``: tokens of a micro-batch.
    """

    def __init__(self, policy: PackedModel, loss: Loss, ranks: Ranks, *, version: int, limit: int) -> None:
        self._policy, self._loss, self._settings, self._ranks = policy, loss, loss.settings, ranks
        self._version, self._limit = version, limit

    def set(self, items: Sequence[TrainingSample], epoch: Sequence[Sequence[TrainingSample]]) -> bool:
        """Whether they are recomputed. ``epoch``: the optimiser batches of the first epoch, which hold all items.

        Raises ``TrainingError`` where the recorded ones are of another distribution, and the settings need them.
        """
        settings = self._settings
        unscaled = self._are_unscaled([item for item in items if item.temperatures is not None])
        if unscaled and (settings.correction != "none" or settings.old_logprobs == "recorded"):
            raise TrainingError(
                f'a correction and old_logprobs = "recorded" need them as they were sampled: {_UNSCALED}'
            )
        why = "the recorded ones are those of temperature 1" if unscaled else self._why_recomputed(items)
        if why is None:
            return False
        live, stale = [item for item in items if self._is_live(item)], list[TrainingSample]()
        reinforces = self._loss.kind == "reinforcement"
        if reinforces and settings.correction == "none":
            stale = [item for item in live if version_of(item.sample) != self._version]
        kept = set(map(id, () if unscaled or settings.old_logprobs == "recomputed" else stale))
        if stale:
            log.warning(
                "%d of %d samples are of other versions than the one that is trained: %s; set [rl.training] correction "
                '= "truncate" (at temperature 1, or with --logprobs-mode processed_logprobs)',
                len(stale),
                len(live),
                "their ratio is to the recorded logprobs, which holds the difference of trainer and server too"
                if kept
                else "with recomputed old logprobs nothing corrects what the policy has moved since",
            )
        if len(kept) == len(live):
            return False
        scaled = [item for item in live if unscaled and item.temperatures is not None]
        if reinforces:
            log.info(
                "old logprobs are recomputed, because %s: forward passes over %d more tokens, each at about a third of "
                "the cost of training on it once",
                why,
                sum(len(item.sample.input_ids) for item in (*live, *scaled)),
            )
        for batch in epoch:
            # In the groups that the step will make of them: bfloat16 rounds by the shapes, by more than GSPO's bounds.
            group = [item for item in batch if self._is_live(item)]
            if not all(id(item) in kept for item in group):
                for item, values in zip(group, self._compute(group), strict=True):
                    if id(item) not in kept:
                        item.old = values
        if scaled:
            for item, values in zip(scaled, self._compute(scaled, scaled=False), strict=True):
                # For the drift only, which so compares the two engines at temperature 1.
                item.recorded = item.old + item.recorded - values
        return True

    def _is_live(self, item: TrainingSample) -> bool:
        """Whether a step computes it: a KL term in the reward gives samples without an advantage one."""
        in_reward = self._settings.kl != "none" and self._settings.kl_in == "reward"
        return in_reward or self._loss.counts(item)

    def _why_recomputed(self, items: Sequence[TrainingSample]) -> str | None:
        settings = self._settings
        if self._loss.old_logprobs == "recorded":
            return None
        if self._loss.old_logprobs == "recomputed":
            return f"{settings.algorithm}, a correction or old_logprobs needs them"
        own = self._first([item for item in items if version_of(item.sample) == self._version])
        found, bound = self._mismatch(own) if own else 0.0, _log_bound(settings)
        if found <= bound:
            return None
        return f"the recorded ones differ by {found:.2g} nats on average, more than the clip's bound of {bound:.2g}"

    def _mismatch(self, items: Sequence[TrainingSample]) -> float:
        """Mean absolute log ratio of the trainer's to the recorded probability."""
        differences = [now - item.recorded for item, now in zip(items, self._compute(items), strict=True)]
        return torch.cat(differences).abs().mean().item()

    def _are_unscaled(self, items: Sequence[TrainingSample]) -> bool:
        """Whether the recorded logprobs are those of temperature 1 (vLLM's ``raw_logprobs``, which is its default, and
        `openhands-rl serve`) and not those that were sampled with (``processed_logprobs``, SGLang).

        No server says so in its answers: they are whichever the trainer's own are nearer to.
        """
        own = self._first(items)
        if not own:
            return False
        scaled, unscaled = self._compute(own), self._compute(own, scaled=False)
        recorded = torch.cat([item.recorded for item in own])
        to_scaled, to_unscaled = ((torch.cat(each) - recorded).abs().sum() for each in (scaled, unscaled))
        return bool(to_unscaled < to_scaled)

    def _compute(self, items: Sequence[TrainingSample], *, scaled: bool = True) -> list[Tensor]:
        return policy_logprobs(self._policy, items, self._limit, self._ranks, scaled=scaled)

    def _first(self, items: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
        """As many as a micro-batch holds, at least one of those that there are."""
        sums = accumulate(len(item.sample.input_ids) for item in items)
        fitting = sum(size <= self._settings.max_tokens_per_micro_batch for size in sums)
        return items[: max(1, fitting)]


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
