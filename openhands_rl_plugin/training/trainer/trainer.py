"""Trains a policy on recorded samples: one trainer, one batch type; an algorithm is a loss over micro-batches."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.machine import return_freed_memory
from openhands_rl_plugin.core.types import Adapter, Probe, Sample
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.data.imitation import PreferencePair
from openhands_rl_plugin.training.distributed.ranks import current_ranks
from openhands_rl_plugin.training.losses.logprobs import Diagnostics
from openhands_rl_plugin.training.losses.losses import (
    Imitation,
    MicroBatchLoss,
    Preference,
    Reinforcement,
    TrainingSample,
    batches,
    samples_from_pairs,
    samples_from_rollouts,
)
from openhands_rl_plugin.training.policies.trained_policy import TrainedPolicy
from openhands_rl_plugin.training.trainer.metrics import (
    NoTracker,
    RunningMetrics,
    TrainMetrics,
    TrainProgress,
    learning_rates,
    tracked,
)
from openhands_rl_plugin.training.trainer.old_logprobs import (
    OldLogprobs,
    check_pairs,
    check_sampled,
    check_samples,
    newest_version,
    policy_logprobs,
    saved_logprobs,
    staleness,
    subtract_divergence,
    subtract_teacher,
    take_logprobs,
)
from openhands_rl_plugin.training.trainer.resume import (
    FullCheckpoint,
    MetricsFile,
    PendingCheckpoint,
    RunCheckpoint,
    ShardedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)

OnProgress = Callable[[TrainProgress], None]
"""Called after every optimiser step."""

OnStep = Callable[[int, Sequence[TrainingSample], Diagnostics], None]
"""Called after each step of a call: its number, its batch, its diagnostics, which have no tokens if it was skipped."""


class Trainer(ABC):
    """A policy and its optimiser. The same settings, calls and samples give the same weights.

    ``version``: the version of the adapter that the policy starts from.
    """

    def __init__(self, policy: TrainedPolicy, settings: TrainingSettings, *, version: int = 0) -> None:
        self.settings = settings
        self.step = 0
        """Optimiser steps so far, over all calls."""
        self._learning_rate = learning_rates(settings, range(0))
        self.pending = PendingCheckpoint()
        """The checkpoints of the calls so far, until ``finish``."""
        self._version = version
        self._policy = policy
        self._ranks = current_ranks(policy.device)
        self._rate = settings.learning_rate

    def sft(
        self, samples: Sequence[Sample], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> TrainMetrics:
        """Fine-tune for ``num_epochs``: minimise the mean negative log-likelihood of the sampled tokens, in nats.

        Advantages and recorded logprobs are ignored. ``run``: a directory for the metrics and checkpoints of this call;
        until ``finish`` is called, the same call resumes a killed one. Raises ``TrainingError`` or ``StorageError``.
        """
        return self._train(samples_from_rollouts(self._checked(samples)), Imitation(self.settings), on_progress, run)

    def reinforce(
        self, samples: Sequence[Sample], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> TrainMetrics:
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
        return self._train(items, Reinforcement(self.settings), on_progress, run)

    def prefer(
        self, pairs: Sequence[PreferencePair], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> TrainMetrics:
        """DPO for ``num_epochs``; the reference model is the policy before this call. ``run``: as for ``sft``.

        A pair is always in one micro-batch, however long it is. Raises ``TrainingError`` or ``StorageError``.
        """
        self._checked([sample for pair in pairs for sample in (*pair.chosen, *pair.rejected)])
        check_pairs(pairs, packed=self._policy.packing.packed, sharded=self._policy.sharded)
        return self._train(samples_from_pairs(pairs), Preference(self.settings), on_progress, run)

    @abstractmethod
    def save_adapter(self, directory: Path) -> None:
        """Write what was trained into ``directory``, as a version of it is stored and published."""

    @property
    def notes(self) -> list[str]:
        """What a user should know before training begins, a line each."""
        return self._policy.notes()

    @property
    def _micro_batch_tokens(self) -> int:
        """Every sequence is longer than one token: then each is a micro-batch of its own."""
        return self.settings.max_tokens_per_micro_batch if self._policy.packing.packed else 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self._ranks.rank == 0

    def probe(self, token_ids: Sequence[int], max_difference: float | None = None) -> Probe:
        """The current policy's logprobs of fixed ids, to check a server against."""
        ids = tuple(token_ids)
        return Probe(
            token_ids=ids,
            logprobs=tuple(self._policy.sequence_logprobs(ids)),
            max_difference=max_difference or self._policy.probe_tolerance,
        )

    def became(self, adapter: Adapter | None) -> None:
        """Note that the weights are this version now, which only rank 0 has. A collective."""
        self._version = int(self._ranks.broadcast_text(str(adapter.version if adapter is not None else self._version)))

    def finish(self) -> None:
        """Delete the checkpoints of the calls so far, because their results are saved now. A collective."""
        self.pending.delete()

    def save_state(self, directory: Path) -> None:
        """Write weights, optimiser and step counter into one file, atomically. Raises ``StorageError``.

        Shuffling depends on the seed and the step counter only, so these are the whole state of the random numbers.
        Raises ``TrainingError`` for sharded weights: give ``run`` to ``sft`` to checkpoint those.
        """
        if self._policy.sharded:
            raise TrainingError(
                "the weights are sharded over processes, so one file cannot hold them; give run= to sft"
            )
        save_checkpoint(directory, self._state(), self._counters())

    def load_state(self, directory: Path) -> None:
        """Continue from ``save_state`` exactly where it was. Raises ``TrainingError`` when it does not fit."""
        self._restore(*load_checkpoint(directory), str(directory))

    def _counters(self) -> dict[str, str]:
        return {"step": str(self.step), "seed": str(self.settings.seed), "version": str(self._version)}

    @abstractmethod
    def _state(self) -> dict[str, Tensor]:
        """Weights and moments, as far as they are here."""

    @abstractmethod
    def _restore(self, tensors: dict[str, Tensor], counters: dict[str, str], source: str) -> None:
        """Continue from what ``_state`` and ``_counters`` gave. Raises ``TrainingError``."""

    @abstractmethod
    def _update(
        self, live: list[TrainingSample], weights: list[float], loss: MicroBatchLoss
    ) -> tuple[float, float | None, Diagnostics]:
        """One optimiser step by samples and the weight of a token of each: loss, norm if it is known, diagnostics.

        With a norm of 0 there was no gradient, as where a correction masks all tokens.
        """

    @abstractmethod
    def _fingerprint(self, samples: list[Sample], loss: MicroBatchLoss) -> str:
        """A digest of everything that the result of a call depends on."""

    def _train(
        self, items: list[TrainingSample], loss: MicroBatchLoss, on_progress: OnProgress | None, run: Path | None
    ) -> TrainMetrics:
        samples = [item.sample for item in items]
        newest = newest_version(samples, self._version)
        name = self._name(samples, loss, run)
        lines = MetricsFile(run) if run is not None and self.is_main_process else None
        kept = self._checkpoint(run, name) if run is not None else None
        done, first_step, tally, recomputed = self._begin(items, loss, kept)
        if lines is not None:
            lines.keep_lines(done)
        order = self._order(items, first_step)
        self._learning_rate = learning_rates(self.settings, range(first_step, first_step + len(order)))
        started = time.monotonic() - tally.seconds
        with tracked(self.settings, name, run) if self.is_main_process else nullcontext(NoTracker()) as tracker:

            def advanced(number: int, batch: Sequence[TrainingSample], found: Diagnostics) -> None:
                tally.seconds = time.monotonic() - started
                progress = _progress(number, len(order), found, tally)
                record = self._record(progress, found, tally)
                record["staleness"] = staleness([item.sample for item in batch], newest)
                tracker.log(number, record)
                if lines is not None:
                    lines.log(record)
                if kept is not None and self._is_kept(number, len(order)):
                    counters = {"first_step": str(first_step), "tally": json.dumps(asdict(tally))}
                    old = saved_logprobs(items) if recomputed else {}
                    kept.save(self._state() | old, self._counters() | counters, number)
                if on_progress is not None:
                    on_progress(progress)

            self._run([*enumerate(order, start=1)][done:], loss, tally, advanced)
        if kept is not None:
            self.pending.add(kept)
        return tally.metrics(len(items), staleness(samples, newest))

    def _order(self, items: list[TrainingSample], first_step: int) -> list[list[TrainingSample]]:
        """The optimiser batches of all epochs."""
        chosen = self.settings
        seed = f"{chosen.seed}:{first_step}"
        return batches(items, size=chosen.batch_size, epochs=chosen.num_epochs, seed=seed, order=chosen.batch_order)

    def _is_kept(self, number: int, last: int) -> bool:
        """Whether to checkpoint after step ``number``; the last step too, until the trained weights are saved."""
        each = self.settings.checkpoint_steps
        return each > 0 and (number % each == 0 or number == last)

    def _checkpoint(self, run: Path, name: str) -> RunCheckpoint:
        kind = ShardedCheckpoint if self._policy.sharded else FullCheckpoint
        return kind(run, name, self._ranks)

    def _name(self, samples: list[Sample], loss: MicroBatchLoss, run: Path | None) -> str:
        """The fingerprint of the run, where it has a directory, ranks or a tracker; the same on all ranks."""
        if run is None and self._ranks.size == 1 and self.settings.tracker == "none":
            return ""
        name = self._fingerprint(samples, loss)
        self._ranks.assert_equal("episodes, weights or settings", name)
        return name

    def _checked(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        check_samples(samples, longest=self._policy.longest, vocabulary=self._policy.vocabulary)
        return samples

    def _begin(
        self, items: list[TrainingSample], loss: MicroBatchLoss, kept: RunCheckpoint | None
    ) -> tuple[int, int, RunningMetrics, bool]:
        """Finished steps of a killed call that is resumed, the step at its start, its metrics so far, and whether the
        old logprobs are recomputed ones."""
        found = kept.resume() if kept is not None else None
        done, first_step, tally, recomputed = 0, self.step, RunningMetrics(), False
        if found is not None:
            tensors, counters = found
            recomputed = take_logprobs(items, tensors)
            self._restore(tensors, counters, "the checkpoint")
            done, first_step = int(counters["done"]), int(counters["first_step"])
            tally = RunningMetrics(**json.loads(counters["tally"]))
        limit = self._micro_batch_tokens
        if found is None:
            order = self._order(items, first_step)
            chosen = OldLogprobs(self._policy, loss, self.settings, self._ranks, version=self._version, limit=limit)
            recomputed = chosen.set(items, order[: len(order) // self.settings.num_epochs])
        if loss.needs_reference:
            with self._policy.without_adapter():
                references = policy_logprobs(self._policy, items, limit, self._ranks)
            for item, part in zip(items, references, strict=True):
                item.reference = part
            if self.settings.kl_in == "reward":
                subtract_divergence(items, self.settings)
        subtract_teacher(items, self.settings)
        return done, first_step, tally, recomputed

    def _run(
        self,
        steps: Sequence[tuple[int, list[TrainingSample]]],
        loss: MicroBatchLoss,
        tally: RunningMetrics,
        advanced: OnStep,
    ) -> None:
        """Make the optimiser steps of a call, each by its number and its batch."""
        for number, batch in steps:
            live, weights = weighted(batch, loss)
            found = Diagnostics()
            if live:
                self._rate = self._learning_rate(self.step)
                total, norm, found = self._update(live, weights, loss)
                self._count(live, total, norm or 0.0, found, tally)
                tally.unmoved += norm == 0.0
            tally.skip(len(batch) - len(live), whole=not live)
            advanced(number, batch, found)

    def _count(
        self, live: Sequence[TrainingSample], total: float, norm: float, found: Diagnostics, tally: RunningMetrics
    ) -> None:
        """Count one optimiser step by these samples."""
        self.step += 1
        return_freed_memory()
        if not tally.losses:
            # Before the first step the difference from the recorded logprobs does not come from training.
            tally.drift = found.drift
        tally.losses.append(total)
        tally.norms.append(norm)
        tally.tokens += sum(len(item.sample.input_ids) for item in live)
        means = asdict(Diagnostics(tally.trained_tokens, **tally.means) + found)
        tally.trained_tokens, tally.means = means.pop("tokens"), means

    def _record(self, progress: TrainProgress, found: Diagnostics, tally: RunningMetrics) -> dict[str, float]:
        """One line of the metrics file."""
        speed = tally.tokens / tally.seconds if tally.seconds else 0.0
        own = {"step": self.step, "learning_rate": self._rate, "seconds": tally.seconds, "tokens_per_second": speed}
        own["packed"] = float(self._policy.packing.packed)
        return own | asdict(progress) | asdict(found)


def weighted(batch: Sequence[TrainingSample], loss: MicroBatchLoss) -> tuple[list[TrainingSample], list[float]]:
    """The samples of an optimiser batch that have a gradient, and the weight of a token of each."""
    live = [item for item in batch if loss.counts(item)]
    if not live:
        return [], []
    weights = dict(zip(map(id, batch), loss.weights(batch).tolist(), strict=True))
    return live, [weights[id(item)] for item in live]


def _progress(number: int, total: int, found: Diagnostics, tally: RunningMetrics) -> TrainProgress:
    """After a step; a step without tokens was skipped."""
    loss, norm = (tally.losses[-1], tally.norms[-1]) if found.tokens else (0.0, 0.0)
    return TrainProgress(number, total, loss, norm, found.ratio, found.approx_kl, found.entropy)
