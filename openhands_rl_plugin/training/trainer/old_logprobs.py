"""The denominator of the importance ratio: logprobs recorded when sampling, or recomputed before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.training.algorithms import algorithm_of, clip_bounds
from openhands_rl_plugin.training.distributed.ranks import Ranks
from openhands_rl_plugin.training.losses.losses import MicroBatchLoss, TrainingSample
from openhands_rl_plugin.training.policies.trained_policy import TrainedPolicy
from openhands_rl_plugin.training.trainer.preparation import policy_logprobs, version_of

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

    def __init__(
        self,
        policy: TrainedPolicy,
        loss: MicroBatchLoss,
        settings: TrainingSettings,
        ranks: Ranks,
        *,
        version: int,
        limit: int,
    ) -> None:
        self._policy = policy
        self._loss = loss
        self._settings = settings
        self._ranks = ranks
        self._version = version
        self._limit = limit

    def set(self, items: Sequence[TrainingSample], epoch: Sequence[Sequence[TrainingSample]]) -> bool:
        """Whether they are recomputed. ``epoch``: the optimiser batches of the first epoch, which hold all items.

        Raises ``TrainingError`` where the recorded ones are of another distribution, and the settings need them.
        """
        scaled = [item for item in items if item.temperatures is not None]
        unscaled = self._are_unscaled(scaled)
        if unscaled and self._settings.correction != "none":
            raise TrainingError(f'correction = "{self._settings.correction}" compares two engines: {_UNSCALED}')
        if unscaled and self._settings.old_logprobs == "recorded":
            raise TrainingError(f'old_logprobs = "recorded": {_UNSCALED}, or set old_logprobs = "auto"')
        why = "the recorded ones are those of temperature 1" if unscaled else self._why_recomputed(items)
        if why is None:
            return False
        live = self._live(items)
        stale = self._stale(live)
        kept = set(map(id, () if unscaled or self._settings.old_logprobs == "recomputed" else stale))
        if stale:
            self._tell_of_stale(len(stale), len(live), kept=bool(kept))
        if len(kept) == len(live):
            return False
        scaled = [item for item in live if unscaled and item.temperatures is not None]
        if algorithm_of(self._settings).kind == "reinforcement":
            log.info(
                "old logprobs are recomputed, because %s: forward passes over %d more tokens, each at about a third of "
                "the cost of training on it once",
                why,
                sum(len(item.sample.input_ids) for item in (*live, *scaled)),
            )
        for batch in epoch:
            self._recompute(batch, kept)
        if scaled:
            for item, values in zip(scaled, self._compute(scaled, scaled=False), strict=True):
                # For the drift only, which so compares the two engines at temperature 1.
                item.recorded = item.old + item.recorded - values
        return True

    def _live(self, items: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Those that a step computes: a KL term in the reward gives samples without an advantage one."""
        if self._settings.kl != "none" and self._settings.kl_in == "reward":
            return list(items)
        return [item for item in items if self._loss.counts(item)]

    def _stale(self, items: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Those of older versions, where no correction accounts for what the policy has moved since."""
        if algorithm_of(self._settings).kind != "reinforcement" or self._settings.correction != "none":
            return []
        return [item for item in items if version_of(item.sample) != self._version]

    def _tell_of_stale(self, number: int, total: int, *, kept: bool) -> None:
        log.warning(
            "%d of %d samples are of other versions than the one that is trained: %s",
            number,
            total,
            "their ratio is to the recorded logprobs, which holds the difference of trainer and server too; "
            '[rl.training] correction = "truncate" separates the two'
            if kept
            else "with recomputed old logprobs nothing corrects what the policy has moved since; set [rl.training] "
            'correction = "truncate" (at temperature 1, or with --logprobs-mode processed_logprobs)',
        )

    def _recompute(self, batch: Sequence[TrainingSample], kept: set[int]) -> None:
        # In the groups that the step will make of them: bfloat16 rounds by the shapes, by more than GSPO's bounds.
        live = self._live(batch)
        if all(id(item) in kept for item in live):
            return
        for item, values in zip(live, self._compute(live), strict=True):
            if id(item) not in kept:
                item.old = values

    def _why_recomputed(self, items: Sequence[TrainingSample]) -> str | None:
        settings = self._settings
        if self._loss.old_logprobs == "recorded":
            return None
        if self._loss.old_logprobs == "recomputed":
            if settings.old_logprobs == "recomputed":
                return 'old_logprobs = "recomputed"'
            return (
                "a correction needs both"
                if settings.correction != "none"
                else f"{settings.algorithm}'s bounds are narrow"
            )
        own = self._first([item for item in items if version_of(item.sample) == self._version])
        if not own:
            return None
        found, bound = self._mismatch(own), _log_bound(settings)
        if found <= bound:
            return None
        return f"the recorded ones differ by {found:.2g} nats on average, more than the clip's bound of {bound:.2g}"

    def _mismatch(self, items: Sequence[TrainingSample]) -> float:
        """Mean absolute log ratio of the trainer's to the recorded probability, of what is clipped: tokens, or
        sequences by their mean."""
        differences = [now - item.recorded for item, now in zip(items, self._compute(items), strict=True)]
        if algorithm_of(self._settings).objective == "gspo":
            return sum(abs(each.mean().item()) for each in differences) / len(differences)
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

    def _first(self, items: Sequence[TrainingSample]) -> list[TrainingSample]:
        """As many as a micro-batch holds, at least one of those that there are."""
        room, found = self._settings.max_tokens_per_micro_batch, list[TrainingSample]()
        for item in items:
            room -= len(item.sample.input_ids)
            if found and room < 0:
                break
            found.append(item)
        return found


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
