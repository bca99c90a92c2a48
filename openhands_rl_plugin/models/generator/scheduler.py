"""Continuous batching: chooses the sequences and tokens of the next step. Runs in one thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable

import torch
from torch import Tensor

from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.machine import return_freed_memory
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.models.generator.attention import BLOCK_TOKENS, PrefixCache, StepRow
from openhands_rl_plugin.models.generator.errors import GenerationFailed, RequestCancelled
from openhands_rl_plugin.models.generator.model import ServedModel
from openhands_rl_plugin.models.generator.sequence import SampledToken, ScoredToken, SequenceState, sample, score_tokens

# Rows of float32 logits per step for prompt logprobs: 64 rows of a vocabulary of 150,000 take 38 MB.
_OBSERVED_ROWS = 64
# On a CPU, while the server is busy: what was freed lies between what is in use. To return it takes 10 ms.
_SECONDS_OF_FREED_MEMORY = 5.0
_LOG = redacting_logger(__name__)
Batch = list[tuple[SequenceState, StepRow]]


class Scheduler:
    """Waiting and running sequences of one model. Not thread-safe."""

    def __init__(self, model: ServedModel, *, max_batch: int, prefill_tokens: int, cache_bytes: int) -> None:
        self._model = model
        self._prefill_tokens = prefill_tokens
        self._free = list(range(max_batch))
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self._left: list[SequenceState] = []
        self.cache = PrefixCache(cache_bytes)
        self._returned = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._waiting and not self._running

    @property
    def counts(self) -> tuple[int, int]:
        """How many sequences run, and how many wait. May be read from any thread."""
        return len(self._running), len(self._waiting)

    @property
    def tokens(self) -> int:
        """Tokens in the slots of running sequences. May be read from any thread."""
        return sum(sequence.computed for sequence in tuple(self._running))

    def use(self, model: ServedModel) -> None:
        """Compute with other weights of the same model from now on. Call it when idle: what is cached is forgotten."""
        self._model = model
        self.cache = PrefixCache(self.cache.max_bytes)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    @torch.inference_mode()
    def step(self) -> list[SequenceState]:
        """Admit sequences, compute one step, sample. Returns the sequences that ended; their futures are done.

        Raises ``CaughtFailure`` when the model computes nothing any more.
        """
        self._left = self._remove_cancelled()
        self._admit()
        if self._running:
            batch = self._schedule()
            try:
                with boundary(FailureKind.MODEL, "generation step"):
                    self._compute(batch)
            except CaughtFailure as caught:
                self._one_by_one(batch, caught)
            self._finish_completed()
        if self._left and self._model.device.type == "cpu":
            self._return_memory()
        return self._left

    def _return_memory(self) -> None:
        now = time.monotonic()
        if now - self._returned > _SECONDS_OF_FREED_MEMORY:
            return_freed_memory()
            self._returned = now

    def _compute(self, batch: Batch) -> None:
        """One step of these sequences: all of them have taken it, or none."""
        logits = self._model.step([row for _, row in batch])
        offset = 0
        ready: list[tuple[SequenceState, int]] = []
        observed: list[list[ScoredToken]] = []
        for sequence, row in batch:
            computed = sequence.computed + len(row.ids)
            if sequence.params.prompt_logprobs is not None and computed <= sequence.prompt_len:
                observed.append(self._score_prompt(sequence, row, logits[offset : offset + len(row.wanted)]))
            else:
                observed.append([])
            offset += len(row.wanted)
            if computed >= len(sequence.ids):
                ready.append((sequence, offset - 1))
        chosen = self._sample(ready, logits) if ready else []
        for (sequence, row), scores in zip(batch, observed, strict=True):
            sequence.computed += len(row.ids)
            sequence.observed.extend(scores)
        for (sequence, _), sampled in zip(ready, chosen, strict=True):
            self._take(sequence, sampled)

    def _one_by_one(self, batch: Batch, caught: CaughtFailure) -> None:
        """After a step that failed: each sequence alone, so that only those fail that are the cause.

        Raises ``CaughtFailure`` when the model computes nothing any more.
        """
        failed = 0
        for sequence, row in batch:
            sequence.random.keep(0)
            try:
                if len(batch) == 1:
                    raise caught
                with boundary(FailureKind.MODEL, "generation step"):
                    self._compute([(sequence, row)])
            except CaughtFailure as alone:
                failed += 1
                self._fail(sequence, alone)
        if failed == len(batch):
            with boundary(FailureKind.MODEL, "generation"):
                self._model.step([StepRow(self._free[-1], 0, [0], None, range(1))])

    def _take(self, sequence: SequenceState, sampled: SampledToken) -> None:
        """Append what was sampled."""
        try:
            with boundary(FailureKind.MODEL, "generation of one sequence"):
                if len(sequence.ids) == sequence.prompt_len:
                    self._cache_prefix(sequence)
                sequence.append(sampled, self._model.eos_ids)
        except CaughtFailure as caught:
            self._fail(sequence, caught)

    def _fail(self, sequence: SequenceState, caught: CaughtFailure) -> None:
        _LOG.error("a sequence failed: %s", caught.failure.message, exc_info=caught.__cause__)
        self._running = [each for each in self._running if each is not sequence]
        self._free_slot(sequence)
        self._left.append(sequence)
        sequence.handle.future.set_exception(GenerationFailed(f"The generation failed: {caught.failure.message}"))

    def release_memory(self) -> None:
        """Free the memory that only running sequences need; keeps the prefix cache. Call it when idle."""
        self._model.slots.clear()
        return_freed_memory()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def abort(self) -> list[SequenceState]:
        """Cancel all sequences; returns them."""
        left = [*self._waiting, *self._running]
        for sequence in left:
            sequence.handle.cancel()
        return self._remove_cancelled()

    def _remove_cancelled(self) -> list[SequenceState]:
        left = [s for s in (*self._waiting, *self._running) if s.handle.cancelled]
        if left:
            self._waiting = deque(s for s in self._waiting if not s.handle.cancelled)
            self._running = [s for s in self._running if not s.handle.cancelled]
            for sequence in left:
                self._free_slot(sequence)
                sequence.handle.future.set_exception(RequestCancelled("the request was cancelled"))
        return left

    def _admit(self) -> None:
        """Assign free slots to waiting sequences, oldest first, and copy the cached prefixes of their prompts.

        A sequence whose next block is being computed for another one waits for it: of equal prompts that arrive
        together (several samples of one turn) only the first is computed.
        """
        under_way = {key for s in self._running if s.pending > 1 and (key := self._missing_block(s)) is not None}
        deferred: list[SequenceState] = []
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            key = self._missing_block(sequence)
            if key is not None and key in under_way:
                deferred.append(sequence)
                continue
            self._free.sort()
            try:
                with boundary(FailureKind.MODEL, "start of a sequence"):
                    self._start(sequence, self._free.pop(0))
            except CaughtFailure as caught:
                self._fail(sequence, caught)
                continue
            if key is not None:
                under_way.add(key)
        self._waiting.extendleft(reversed(deferred))

    def _missing_block(self, sequence: SequenceState) -> tuple[Hashable, ...] | None:
        if not self.cache.max_bytes or sequence.params.prompt_logprobs is not None:
            return None
        return self.cache.match(sequence.adapter, sequence.ids[: sequence.prompt_len]).missing

    def _start(self, sequence: SequenceState, slot: int) -> None:
        sequence.slot = slot
        self._running.append(sequence)
        if sequence.params.prompt_logprobs is not None:
            return  # every position must be computed
        blocks = self.cache.match(sequence.adapter, sequence.ids).blocks
        self._model.slots.ensure(len(sequence.ids))
        for index, block in enumerate(blocks):
            self._model.slots.write(slot, index * BLOCK_TOKENS, block)
        sequence.computed = sequence.cached = len(blocks) * BLOCK_TOKENS

    def _schedule(self) -> Batch:
        """All decoding sequences, and prefill chunks up to the budget of prompt tokens (oldest first)."""
        budget = self._prefill_tokens
        batch: Batch = []
        decoding: list[SequenceState] = []
        for sequence in self._running:
            count = sequence.pending
            if count == 1:
                decoding.append(sequence)
                continue
            if budget <= 0:
                continue
            count = min(count, budget)
            if sequence.params.prompt_logprobs is not None:
                count = min(count, _OBSERVED_ROWS)
            budget -= count
            batch.append((sequence, self._row(sequence, count)))
        return [*batch, *((sequence, self._row(sequence, 1)) for sequence in decoding)]

    @staticmethod
    def _row(sequence: SequenceState, count: int) -> StepRow:
        start = sequence.computed
        if sequence.params.prompt_logprobs is not None and start < sequence.prompt_len:
            wanted = range(count)
        else:
            wanted = range(count - 1, count) if count == sequence.pending else range(0)
        return StepRow(sequence.slot, start, sequence.ids[start : start + count], sequence.adapter, wanted)

    @staticmethod
    def _score_prompt(sequence: SequenceState, row: StepRow, logits: Tensor) -> list[ScoredToken]:
        following = sequence.ids[row.start + 1 : min(row.start + len(row.ids) + 1, sequence.prompt_len)]
        if not following:
            return []
        return score_tokens(logits[: len(following)], following, sequence.params.prompt_logprobs or 0)

    @staticmethod
    def _sample(ready: list[tuple[SequenceState, int]], logits: Tensor) -> list[SampledToken]:
        indices = [index for _, index in ready]
        rows = logits if indices == list(range(logits.shape[0])) else logits[indices]
        return sample(rows, [each.params for each, _ in ready], [each.random for each, _ in ready])

    def _finish_completed(self) -> None:
        for sequence in [s for s in self._running if s.finished]:
            try:
                with boundary(FailureKind.MODEL, "end of a sequence"):
                    self._cache_prefix(sequence)
                    result = sequence.result()
            except CaughtFailure as caught:
                self._fail(sequence, caught)
                continue
            self._running.remove(sequence)
            self._free_slot(sequence)
            self._left.append(sequence)
            sequence.handle.future.set_result(result)

    def _cache_prefix(self, sequence: SequenceState) -> None:
        slots, slot = self._model.slots, sequence.slot
        ids = sequence.ids[: sequence.computed]
        self.cache.insert(sequence.adapter, ids, lambda start, stop: slots.read(slot, start, stop))

    def _free_slot(self, sequence: SequenceState) -> None:
        if sequence.slot >= 0:
            self._free.append(sequence.slot)
            sequence.slot = -1
