"""Trains a policy on recorded samples, from these to the optimiser step: one trainer, one batch type, three losses.

``sft``, ``reinforce`` and ``prefer`` make ``TrainingSample`` of samples (``losses``); ``_begin`` resumes a killed call
or sets the logprobs that ratios and KL terms are relative to (``set_old_logprobs``); ``_train`` makes the steps of all
optimiser batches; ``_update`` makes one, of micro-batches, and ``_backward`` the gradient of one of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import LOCAL, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.core.machine import return_freed_memory
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Adapter, Probe, Sample
from openhands_rl_plugin.training.algorithms import algorithm_of, check_start, clip_bounds, digest_of
from openhands_rl_plugin.training.data.dataset import PreferencePair
from openhands_rl_plugin.training.data.packing import lay_out
from openhands_rl_plugin.training.distributed.ranks import (
    Ranks,
    all_reduce_metrics,
    current_ranks,
    full_tensor,
    local_shard,
    shard_like,
    shard_micro_batches,
)
from openhands_rl_plugin.training.losses import (
    SUMS,
    Loss,
    MicroBatch,
    TrainingSample,
    batches,
    samples_from_pairs,
    samples_from_rollouts,
    temperatures_of,
)
from openhands_rl_plugin.training.policies.full_policy import FullPolicy
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.policies.packed_model import PackedModel
from openhands_rl_plugin.training.trainer.metrics import (
    NOTHING,
    STATE_FILE,
    RunCheckpoint,
    RunLog,
    add_step,
    learning_rates,
    load_checkpoint,
    metrics_of,
    save_checkpoint,
)


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


def subtract_teacher(items: Sequence[TrainingSample], settings: TrainingSettings) -> None:
    """Subtract from each token's advantage ``opd_weight`` times its part of KL(policy || teacher), ``old - teacher``.

    The policy gradient is then that of the divergence at each sampled token, clipped as that of a reward is.
    """
    for item in items:
        if item.teacher is not None:
            item.advantages = item.advantages - settings.opd_weight * (item.old - item.teacher)


def staleness(samples: Sequence[Sample], newest: int) -> float:
    """Mean number of versions between the newest one and the one that sampled (base model: version 0)."""
    return sum(newest - version_of(sample) for sample in samples) / len(samples)


def version_of(sample: Sample) -> int:
    """The version that sampled it; 0 is the base model."""
    return (sample.policy.version if sample.policy is not None else None) or 0


log = redacting_logger(__name__)

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
    live = [item for item in items if loss.counts(item)]

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


def _log_bound(settings: TrainingSettings) -> float:
    """The nearer of the clip's bounds, as a log ratio."""
    low, high = clip_bounds(settings)
    return min(math.log1p(high), -math.log1p(-low) if low < 1 else math.inf)


OnProgress = Callable[[Mapping[str, float]], None]
"""Called after every optimiser step with its line of ``metrics.jsonl``: ``done`` of ``total`` steps, its ``loss``."""


class Trainer:
    """A policy and its optimiser, in one process or sharded over several.

    The same settings, calls and samples give the same weights. ``version``: the version of the adapter that the policy
    starts from.
    """

    def __init__(self, policy: PackedModel, settings: TrainingSettings, *, version: int = 0) -> None:
        self.settings = settings
        self.step = 0
        """Optimiser steps so far, over all calls."""
        self.pending: list[RunCheckpoint] = []
        """The checkpoints of the calls so far, until ``finish``."""
        self.parameters = policy.parameters
        """The float32 weights that are trained, by name."""
        self.policy = policy
        """The model that is trained."""
        self._version = version
        self._ranks = current_ranks(policy.device)
        self._rate = settings.learning_rate

    @cached_property
    def _optimizer(self) -> torch.optim.AdamW:
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        return torch.optim.AdamW(list(self.parameters.values()), lr=rate, weight_decay=decay, fused=True)

    def sft(
        self, samples: Sequence[Sample], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> dict[str, float]:
        """Fine-tune for ``num_epochs``: minimise the mean negative log-likelihood of the sampled tokens, in nats.

        Advantages and recorded logprobs are ignored. ``run``: a directory for the metrics and checkpoints of this call;
        until ``finish`` is called, the same call resumes a killed one. Raises ``TrainingError`` or ``StorageError``.
        """
        items = samples_from_rollouts(self._checked(samples))
        return self._train(items, Loss(self.settings, "imitation"), on_progress, run)

    def reinforce(
        self, samples: Sequence[Sample], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> dict[str, float]:
        """A policy gradient for ``num_epochs`` by the algorithm of the settings. ``run``: as for ``sft``.

        Logits are divided by the temperature that an answer was sampled at. The old logprobs are the recorded ones or
        those of the policy before this call, as ``old_logprobs`` says.
        Samples with an advantage of zero are not computed; their tokens still count in the mean. A step with only such
        samples is skipped. Raises ``TrainingError`` or ``StorageError``.
        """
        if algorithm_of(self.settings).kind != "reinforcement":
            raise TrainingError(f"{self.settings.algorithm} does not reinforce; choose another [rl.training] algorithm")
        check_sampled(self._checked(samples))
        items = samples_from_rollouts(samples, as_sampled=True)
        return self._train(items, Loss(self.settings), on_progress, run)

    def prefer(
        self, pairs: Sequence[PreferencePair], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> dict[str, float]:
        """DPO for ``num_epochs``; the reference model is the policy before this call. ``run``: as for ``sft``.

        A pair is always in one micro-batch, however long it is. Raises ``TrainingError`` or ``StorageError``.
        """
        self._checked([sample for pair in pairs for sample in (*pair.chosen, *pair.rejected)])
        if self.policy.sharded and not self.policy.packing.packed:
            raise TrainingError(
                "this model computes one sequence at a time, and pairs may have different numbers of them, so that "
                'processes with sharded layers would wait for each other for ever: set [rl.training] sharding = "none"'
            )
        return self._train(samples_from_pairs(pairs), Loss(self.settings, "preference"), on_progress, run)

    def save_adapter(self, directory: Path) -> None:
        """Write what was trained into ``directory``, as a version of it is stored and published.

        An adapter is in PEFT's format, a whole model in the layout of Hugging Face.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.policy.save(directory)

    def hand_over(self) -> None:
        """Send this rank's shards of the weights to rank 0, which calls ``save_adapter`` at the same time."""
        if isinstance(self.policy, FullPolicy):
            self.policy.hand_over()

    @property
    def notes(self) -> list[str]:
        """Notes for the user before training begins, a line each."""
        return self.policy.notes() if self.is_main_process else []

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self._ranks.rank == 0

    def probe(self, token_ids: Sequence[int]) -> Probe:
        """The current policy's logprobs of fixed ids, to check a server against."""
        ids = tuple(token_ids)
        return Probe(
            token_ids=ids,
            logprobs=tuple(self.policy.sequence_logprobs(ids)),
            max_difference=self.policy.probe_tolerance,
        )

    def set_policy_version(self, adapter: Adapter | None) -> None:
        """Set the version of the current weights on all ranks; only rank 0 passes ``adapter``. A collective."""
        self._version = self._ranks.broadcast(adapter.version if adapter is not None else self._version)

    def finish(self) -> None:
        """Delete the checkpoints of the calls so far, because their results are saved now. A collective."""
        while self.pending:
            self.pending.pop().delete()

    def save_state(self, directory: Path) -> None:
        """Write weights, optimiser and step counter into one file, atomically. Raises ``StorageError``.

        Shuffling depends on the seed and the step counter only, so these are the whole state of the random numbers.
        Raises ``TrainingError`` for sharded weights: give ``run`` to ``sft`` to checkpoint those.
        """
        if self.policy.sharded:
            raise TrainingError(
                "the weights are sharded over processes, so one file cannot hold them; give run= to sft"
            )
        save_checkpoint(directory / STATE_FILE, self._state())

    def load_state(self, directory: Path) -> None:
        """Continue from ``save_state`` exactly where it was. Raises ``TrainingError`` when it does not fit."""
        try:
            self._restore(load_checkpoint(directory / STATE_FILE), str(directory))
        except KeyError as error:
            raise TrainingError(f"{directory}: another engine's state, without {error}; choose that engine") from error

    def _train(
        self, items: list[TrainingSample], loss: Loss, on_progress: OnProgress | None, run: Path | None
    ) -> dict[str, float]:
        """Make the optimiser steps of a call; returns its metrics (``metrics_of``)."""
        samples, settings = [item.sample for item in items], self.settings
        newest, kept = max(self._version, *map(version_of, samples)), None
        if run is not None or self._ranks.size > 1:
            name = self._fingerprint(samples, loss)
            self._ranks.assert_equal("episodes, weights or settings", name)
            kept = RunCheckpoint(run, name, self._ranks, sharded=self.policy.sharded) if run is not None else None
        start = self._begin(items, loss, kept)
        done, first_step, tally = start["done"], start["first_step"], start["tally"]
        tally |= {"samples": float(len(items)), "staleness": staleness(samples, newest)}
        order = self._order(items, first_step)
        rate = learning_rates(settings, range(first_step, first_step + len(order)))
        started = time.monotonic() - tally["seconds"]
        leads = settings if self.is_main_process else settings.model_copy(update={"tracker": "none"})
        with closing(RunLog(leads, run if self.is_main_process else None, done)) as log:
            for number, batch in enumerate(order[done:], start=done + 1):
                live = [item for item in batch if loss.counts(item)]
                total, norm, sums = 0.0, 0.0, dict.fromkeys(SUMS, 0.0)
                if live:
                    self._rate = rate(self.step)
                    weights = dict(zip(map(id, batch), loss.weights(batch).tolist(), strict=True))
                    total, norm, sums = self._update(live, [weights[id(item)] for item in live], loss)
                    self.step += 1
                    return_freed_memory()
                    add_step(tally, sum(len(item.sample.input_ids) for item in live), total, norm, sums)
                tally["skipped_samples"] += len(batch) - len(live)
                tally["skipped_steps"] += not live
                tally["seconds"] = time.monotonic() - started
                record = {name: sums[name] / (sums["tokens"] or 1.0) for name in SUMS} | {"tokens": sums["tokens"]}
                record |= {"done": number, "total": len(order), "loss": total, "grad_norm": norm or 0.0}
                record |= {"step": self.step, "learning_rate": self._rate, "seconds": tally["seconds"]}
                record |= {"tokens_per_second": tally["tokens"] / (tally["seconds"] or 1.0)}
                record |= {"packed": float(self.policy.packing.packed)}
                record["staleness"] = staleness([item.sample for item in batch], newest)
                log.log(number, record)
                each = settings.checkpoint_steps  # the last step too, until the trained weights are saved
                if kept is not None and each and (number % each == 0 or number == len(order)):
                    kept.save({**self._state(), **start, "done": number, "tally": tally}, number)
                if on_progress is not None:
                    on_progress(record)
        if kept is not None:
            self.pending.append(kept)
        return metrics_of(tally)

    def _begin(self, items: list[TrainingSample], loss: Loss, kept: RunCheckpoint | None) -> dict[str, Any]:
        """The data of a call's checkpoints, besides the state of weights and optimiser.

        ``done``: steps of the killed call that is resumed; the ``first_step``; the ``tally``; and the old and recorded
        ``logprobs``, if they were recomputed.
        """
        state, limit = kept.resume() if kept is not None else None, self._micro_batch_tokens
        if state is not None:
            start = {name: state.pop(name) for name in ("done", "first_step", "tally", "logprobs")}
            for item, (old, recorded) in zip(items, start["logprobs"] or [], strict=bool(start["logprobs"])):
                item.old, item.recorded = old, recorded
            self._restore(state, "the checkpoint")
        else:
            start: dict[str, Any] = {"done": 0, "first_step": self.step, "tally": {**NOTHING}, "logprobs": None}
            order = self._order(items, self.step)
            epoch = order[: len(order) // self.settings.num_epochs]
            if set_old_logprobs(self.policy, loss, items, epoch, self._ranks, version=self._version, limit=limit):
                start["logprobs"] = [(item.old, item.recorded) for item in items]
        if loss.needs_reference:
            with self.policy.without_adapter():
                references = policy_logprobs(self.policy, items, limit, self._ranks)
            for item, part in zip(items, references, strict=True):
                item.reference = part
        subtract_teacher(items, self.settings)
        return start

    def _update(
        self, live: list[TrainingSample], weights: list[float], loss: Loss
    ) -> tuple[float, float | None, dict[str, float]]:
        """One optimiser step by samples and the weight of a token of each: loss, norm if it is known, ``SUMS``.

        With a norm of 0 there was no gradient, as where a correction masks all tokens.
        """
        share_of = dict(zip(map(id, live), weights, strict=True))
        self._optimizer.zero_grad(set_to_none=True)
        total, sums = 0.0, dict.fromkeys(SUMS, 0.0)
        mine, idle = shard_micro_batches(self._ranks, live, self._micro_batch_tokens, whole_units=loss.whole_units)
        for group in mine:
            each = [share_of[id(item)] for item in group]
            share, found = self._backward(group, each, loss)
            total, sums = total + share, {name: sums[name] + found[name] for name in SUMS}
        for group in idle:
            self._backward(group, [0.0] * len(group), loss)
        for parameter in self.parameters.values():
            if parameter.grad is None:  # of an expert that no token was sent to: every rank has the same gradients
                parameter.grad = torch.zeros_like(parameter)
        if not self.policy.sharded:  # FSDP sums them in the backward pass
            self._ranks.all_reduce([each.grad for each in self.parameters.values() if each.grad is not None])
        total, sums = all_reduce_metrics(self._ranks, total, sums)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)
        norm = full_tensor(norm).item()
        if not (math.isfinite(total) and math.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"step {self.step + 1}: the loss is {total} and the gradient norm {norm}; the weights are unchanged. "
                "Lower learning_rate, or check the recorded logprobs"
            )
        self._optimizer.param_groups[0]["lr"] = self._rate
        self._optimizer.step()
        return total, norm, sums

    def _backward(
        self, group: list[TrainingSample], weights: list[float], loss: Loss
    ) -> tuple[float, dict[str, float]]:
        """Accumulate the gradient of one micro-batch; returns its share of the loss."""
        logprobs, entropies = micro_batch_logprobs(self.policy, group)
        share, sums = loss(MicroBatch(group, logprobs, entropies, logprobs.new_tensor(weights)))
        share.backward()
        return share.item(), sums

    @property
    def _micro_batch_tokens(self) -> int:
        """Every sequence is longer than one token: then each is a micro-batch of its own."""
        return self.settings.max_tokens_per_micro_batch if self.policy.packing.packed else 1

    def _order(self, items: list[TrainingSample], first_step: int) -> list[list[TrainingSample]]:
        """The optimiser batches of all epochs."""
        chosen = self.settings
        seed = f"{chosen.seed}:{first_step}"
        return batches(items, size=chosen.batch_size, epochs=chosen.num_epochs, seed=seed)

    def _checked(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        check_samples(samples, longest=self.policy.longest, vocabulary=self.policy.vocabulary)
        return samples

    def _state(self) -> dict[str, Any]:
        """Weights and moments, or this rank's shards of them, and the counters."""
        moments = {
            name: {key: local_shard(moment) for key, moment in self._optimizer.state.get(parameter, {}).items()}
            for name, parameter in self.parameters.items()
        }
        return {"weights": self.policy.weights(), "moments": moments, "step": self.step, "version": self._version}

    def _restore(self, state: dict[str, Any], source: str) -> None:
        """Continue from what ``_state`` gave. Raises ``TrainingError``."""
        self.policy.set_weights(state["weights"], source)
        self._optimizer.state.clear()
        for name, moments in state["moments"].items():
            parameter = self.parameters[name]
            if moments:
                self._optimizer.state[parameter] = {
                    # Where the step is counted on the device, fused AdamW wants it there.
                    key: moment.to(parameter.device) if key == "step" else shard_like(parameter, moment)
                    for key, moment in moments.items()
                }
        self.step, self._version = state["step"], state["version"]

    def _fingerprint(self, samples: list[Sample], loss: Loss) -> str:
        """A digest of everything that the result of a call depends on."""
        # Sums of integers do not depend on the sharding of the weights.
        parts = self.policy.weights().values()
        sums = torch.stack([part.contiguous().view(torch.int32).sum(dtype=torch.int64).cpu() for part in parts])
        if self.policy.sharded:
            self._ranks.all_reduce([sums])
        return digest_of(samples, self.settings, loss.kind, self.policy.model_path, self.step, sums.tolist())


class LocalTrainer(Trainer):
    """Trains on this machine, by ``method``: an adapter, one on a quantised base, or all weights.

    ``adapter``: start from this version instead of fresh weights; one that is a whole model takes the place of the one
    in ``model_path``. Where all weights are trained there is no copy of the model that training began with, so that a
    KL term is refused; the logprobs that ratios and DPO are relative to are computed before the first step. Raises
    ``TrainingError`` when the model or the version cannot be used.
    """

    def __init__(self, model_path: str | Path, settings: TrainingSettings, *, adapter: Adapter | None = None) -> None:
        if settings.engine != LOCAL:
            raise ConfigError(
                f'[rl.training] engine = "{settings.engine}": only `train` and `loop` train by it; set "{LOCAL}"'
            )
        check_start(adapter, settings)
        if settings.method == "full":
            policy = FullPolicy(model_path if adapter is None else adapter.path, settings)
        else:
            policy = TrainablePolicy(model_path, settings)
            if adapter is not None:
                policy.load(Path(adapter.path))
        super().__init__(policy, settings, version=adapter.version if adapter is not None else 0)
        if isinstance(policy, FullPolicy):
            self._optimizer.register_step_post_hook(lambda *_: policy.round())
