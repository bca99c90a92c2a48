"""Continuous batching: chooses the sequences and tokens of the next step. Runs in one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import torch
from torch import Tensor

from openhands_rl_plugin.core.memory import return_freed_memory
from openhands_rl_plugin.models.generator.attention import StepRow
from openhands_rl_plugin.models.generator.errors import RequestCancelled
from openhands_rl_plugin.models.generator.model import ServedModel
from openhands_rl_plugin.models.generator.prefix_cache import BLOCK_TOKENS, PrefixCache
from openhands_rl_plugin.models.generator.sampling import sample, score_tokens
from openhands_rl_plugin.models.generator.sequence import SequenceState

# Rows of float32 logits per step for prompt logprobs: 64 rows of a vocabulary of 150,000 take 38 MB.
_OBSERVED_ROWS = 64


class Scheduler:
    """Waiting and running sequences of one model. Not thread-safe."""

    def __init__(self, model: ServedModel, *, max_batch: int, prefill_tokens: int, cache_bytes: int) -> None:
        self._model = model
        self._prefill_tokens = prefill_tokens
        self._free = list(range(max_batch))
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self.cache = PrefixCache(cache_bytes)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._waiting and not self._running

    def use(self, model: ServedModel) -> None:
        """Compute with other weights of the same model from now on. Call it when idle: what is cached is forgotten."""
        self._model = model
        self.cache = PrefixCache(self.cache.max_bytes)

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    @torch.inference_mode()
    def step(self) -> list[SequenceState]:
        """Admit sequences, compute one step, sample. Returns the sequences that finished; their futures are done."""
        left = self._remove_cancelled()
        self._admit()
        if not self._running:
            return left
        batch = self._schedule()
        logits = self._model.step([row for _, row in batch])
        offset = 0
        ready: list[tuple[SequenceState, int]] = []
        for sequence, row in batch:
            sequence.computed += len(row.ids)
            if sequence.params.prompt_logprobs is not None and sequence.computed <= sequence.prompt_len:
                self._score_prompt(sequence, row, logits[offset : offset + len(row.wanted)])
            offset += len(row.wanted)
            if sequence.pending == 0:
                ready.append((sequence, offset - 1))
        if ready:
            self._sample(ready, logits)
        return left + self._finish_completed()

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
            self._start(sequence, self._free.pop(0))
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

    def _schedule(self) -> list[tuple[SequenceState, StepRow]]:
        """All decoding sequences, and prefill chunks up to the budget of prompt tokens (oldest first)."""
        budget = self._prefill_tokens
        batch: list[tuple[SequenceState, StepRow]] = []
        for sequence in self._running:
            count = sequence.pending
            if count > 1:
                if budget <= 0:
                    continue
                count = min(count, budget)
                if sequence.params.prompt_logprobs is not None:
                    count = min(count, _OBSERVED_ROWS)
                budget -= count
            batch.append((sequence, self._row(sequence, count)))
        return batch

    @staticmethod
    def _row(sequence: SequenceState, count: int) -> StepRow:
        start = sequence.computed
        if sequence.params.prompt_logprobs is not None and start < sequence.prompt_len:
            wanted = range(count)
        else:
            wanted = range(count - 1, count) if count == sequence.pending else range(0)
        return StepRow(sequence.slot, start, sequence.ids[start : start + count], sequence.adapter, wanted)

    @staticmethod
    def _score_prompt(sequence: SequenceState, row: StepRow, logits: Tensor) -> None:
        following = sequence.ids[row.start + 1 : min(row.start + len(row.ids) + 1, sequence.prompt_len)]
        if following:
            count = sequence.params.prompt_logprobs or 0
            sequence.observed.extend(score_tokens(logits[: len(following)], following, count))

    def _sample(self, ready: list[tuple[SequenceState, int]], logits: Tensor) -> None:
        indices = [index for _, index in ready]
        rows = logits if indices == list(range(logits.shape[0])) else logits[indices]
        chosen = sample(rows, [s.params for s, _ in ready], [s.rng for s, _ in ready])
        for (sequence, _), sampled in zip(ready, chosen, strict=True):
            if len(sequence.ids) == sequence.prompt_len:
                self._cache_prefix(sequence)
            sequence.append(sampled, self._model.eos_ids)

    def _finish_completed(self) -> list[SequenceState]:
        finished = [s for s in self._running if s.finished]
        if finished:
            self._running = [s for s in self._running if not s.finished]
            for sequence in finished:
                self._cache_prefix(sequence)
                self._free_slot(sequence)
                sequence.handle.future.set_result(sequence.result())
        return finished

    def _cache_prefix(self, sequence: SequenceState) -> None:
        slots, slot = self._model.slots, sequence.slot
        ids = sequence.ids[: sequence.computed]
        self.cache.insert(sequence.adapter, ids, lambda start, stop: slots.read(slot, start, stop))

    def _free_slot(self, sequence: SequenceState) -> None:
        if sequence.slot >= 0:
            self._free.append(sequence.slot)
            sequence.slot = -1
