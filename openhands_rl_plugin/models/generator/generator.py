"""The generator: a scheduler thread that owns the model; requests and adapters come from any thread.

with Generator(GeneratorConfig(model="path/to/model")) as generator:
    generator.load_adapter("policy-v000001", Path("adapters/policy-v000001"))
    handle = generator.submit(prompt_ids, DecodingParams(max_tokens=64), adapter="policy-v000001")
    answer = handle.future.result()        # or: await asyncio.wrap_future(handle.future)
    answer.token_ids, answer.logprobs, answer.text, answer.finish_reason
"""

from __future__ import annotations

import queue
import re
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from openhands_rl_plugin.core.errors import CaughtFailure, InfrastructureError, RLError, boundary, describe
from openhands_rl_plugin.core.files import is_file
from openhands_rl_plugin.core.machine import forget_unused, return_freed_memory
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.errors import (
    GenerationFailed,
    InvalidUserInput,
    NotFound,
    Overloaded,
    RequestCancelled,
    ServingError,
    StartError,
)
from openhands_rl_plugin.models.generator.model import LoadedAdapter, ServedModel, StepRow
from openhands_rl_plugin.models.generator.sequence import (
    DecodingParams,
    DeltaCallback,
    Generation,
    RequestHandle,
    SampledToken,
    SequenceState,
    sample,
    score_tokens,
)
from openhands_rl_plugin.models.generator.threads import in_passing_thread

_LOG = redacting_logger(__name__)
BLOCK_TOKENS = 16
_BLOCK_BYTES = 2048
"""What Python and torch keep for a block beside its keys and values."""
BlockKey = tuple[LoadedAdapter | None, bytes]
"""The adapter, and a digest of all ids up to the end of the block."""


class PrefixCache:
    """Keys and values of blocks of ids, each behind the same earlier ids under the same adapter.

    Evicts the least recently used blocks when ``max_bytes`` is exceeded. Not thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes = 0
        # Oldest first. A prefix is touched from its end, so a block is never older than those that follow it.
        self._blocks: OrderedDict[BlockKey, Tensor] = OrderedDict()

    def match(self, owner: LoadedAdapter | None, ids: Sequence[int]) -> tuple[list[Tensor], BlockKey | None]:
        """The blocks of the longest cached prefix of ``ids`` (never all of it: the last token must be computed).

        Then the first full block that is not cached, ``None`` where all are: two prompts that need the same one are
        recognised by it.
        """
        keys = self._keys(owner, ids, len(ids) - 1)
        found = list(takewhile(self._blocks.__contains__, keys))
        self._touch(found)
        return [self._blocks[key] for key in found], keys[len(found)] if len(found) < len(keys) else None

    def insert(self, owner: LoadedAdapter | None, ids: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Add the full blocks of ``ids`` that are new; ``read(start, stop)`` copies their keys and values."""
        keys = self._keys(owner, ids, len(ids))
        for at, key in enumerate(keys):
            if key not in self._blocks:
                self._blocks[key] = read(at * BLOCK_TOKENS, (at + 1) * BLOCK_TOKENS)
                self._bytes += self._blocks[key].nbytes + _BLOCK_BYTES
        self._touch(keys)
        while self._bytes > self.max_bytes:
            self._remove(next(iter(self._blocks)))

    def drop(self, owner: LoadedAdapter) -> None:
        """Remove all blocks of an adapter version."""
        for key in [key for key in self._blocks if key[0] is owner]:
            self._remove(key)

    def _keys(self, owner: LoadedAdapter | None, ids: Sequence[int], limit: int) -> list[BlockKey]:
        data, digest, keys = array("q", ids).tobytes(), blake2b(digest_size=16), list[BlockKey]()
        for at in range(limit // BLOCK_TOKENS if self.max_bytes else 0):
            digest.update(data[at * BLOCK_TOKENS * 8 : (at + 1) * BLOCK_TOKENS * 8])
            keys.append((owner, digest.digest()))
        return keys

    def _touch(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _remove(self, key: BlockKey) -> None:
        self._bytes -= self._blocks.pop(key).nbytes + _BLOCK_BYTES


# Rows of float32 logits per step for prompt logprobs: 64 rows of a vocabulary of 150,000 take 38 MB.
_OBSERVED_ROWS = 64
# On a CPU, while the server is busy: what was freed lies between what is in use. To return it takes 10 ms.
_SECONDS_OF_FREED_MEMORY = 5.0
Batch = list[tuple[SequenceState, StepRow]]


class Scheduler:
    """Continuous batching: chooses the sequences and tokens of the next step. Not thread-safe."""

    def __init__(self, model: ServedModel, *, max_batch: int, prefill_tokens: int, cache_bytes: int) -> None:
        self._model = model
        self._prefill_tokens = prefill_tokens
        self._free = set(range(max_batch))
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self._left: list[SequenceState] = []
        self.cache = PrefixCache(cache_bytes)
        self._returned = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.waiting and not self.running

    def use(self, model: ServedModel) -> None:
        """Compute with other weights of the same model from now on. Call it when idle: what is cached is forgotten."""
        self._model = model
        self.cache = PrefixCache(self.cache.max_bytes)

    @torch.inference_mode()
    def step(self) -> list[SequenceState]:
        """Admit sequences, compute one step, sample. Returns the sequences that ended; their futures are done.

        A step that fails ends all sequences that run. Raises ``CaughtFailure`` when the model computes nothing more.
        """
        self._left = []
        self._remove_cancelled()
        try:
            with boundary(FailureKind.MODEL, "generation step"):
                self._admit()
                if self.running:
                    self._compute(self._schedule())
                self._finish_completed()
        except CaughtFailure as caught:
            for sequence in tuple(self.running):
                self._fail(sequence, caught)
            with boundary(FailureKind.MODEL, "generation"):
                self._model.step([StepRow(0, 0, [0], None, range(1))])
        if (
            self._left
            and self._model.device.type == "cpu"
            and time.monotonic() - self._returned > _SECONDS_OF_FREED_MEMORY
        ):
            return_freed_memory()
            self._returned = time.monotonic()
        return self._left

    def release_memory(self) -> None:
        """Free the memory that only running sequences need; keeps the prefix cache. Call it when idle."""
        self._model.slots.clear()
        return_freed_memory()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def abort(self) -> list[SequenceState]:
        """Cancel all sequences; returns them."""
        self._left = []
        for sequence in (*self.waiting, *self.running):
            sequence.handle.cancel()
        self._remove_cancelled()
        return self._left

    def _compute(self, batch: Batch) -> None:
        """One step of these sequences."""
        logits = self._model.step([row for _, row in batch])
        offset = 0
        ready: list[tuple[SequenceState, int]] = []
        for sequence, row in batch:
            following = sequence.ids[row.start + 1 : min(row.stop + 1, sequence.prompt_len)]
            if following and (count := sequence.params.prompt_logprobs) is not None:
                sequence.observed += score_tokens(logits[offset : offset + len(following)], following, count)
            offset += len(row.wanted)
            sequence.computed = row.stop
            if not sequence.pending:
                ready.append((sequence, offset - 1))
        if not ready:
            return
        indices = [index for _, index in ready]
        rows = logits if indices == list(range(logits.shape[0])) else logits[indices]
        chosen = sample(rows, [each.params for each, _ in ready], [each.random for each, _ in ready])
        for (sequence, _), sampled in zip(ready, chosen, strict=True):
            self._take(sequence, sampled)

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
        self._leave(sequence)
        sequence.handle.future.set_exception(GenerationFailed(f"The generation failed: {caught.failure.message}"))

    def _leave(self, sequence: SequenceState) -> None:
        """Take a sequence out; its slot is free again."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if sequence.slot >= 0:
            self._free.add(sequence.slot)
        self._left.append(sequence)

    def _remove_cancelled(self) -> None:
        for sequence in [each for each in (*self.waiting, *self.running) if each.handle.cancelled]:
            self._leave(sequence)
            sequence.handle.future.set_exception(RequestCancelled("the request was cancelled"))

    def _admit(self) -> None:
        """Assign free slots to waiting sequences, oldest first, and copy the cached prefixes of their prompts.

        A sequence whose next block is being computed for another one waits for it: of equal prompts that arrive
        together (several samples of one turn) only the first is computed.
        """
        under_way = {self._cached(each)[1] for each in self.running if each.pending > 1} if self.waiting else set()
        for sequence in tuple(self.waiting):
            if not self._free:
                return
            blocks, missing = self._cached(sequence)
            if missing is not None and missing in under_way:
                continue
            under_way.add(missing)
            sequence.slot = min(self._free)
            self._free.remove(sequence.slot)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self._model.slots.ensure(len(sequence.ids))
            for index, block in enumerate(blocks):
                self._model.slots.write(sequence.slot, index * BLOCK_TOKENS, block)
            sequence.computed = sequence.cached = len(blocks) * BLOCK_TOKENS

    def _cached(self, sequence: SequenceState) -> tuple[list[Tensor], BlockKey | None]:
        if sequence.params.prompt_logprobs is not None:
            return [], None  # every position must be computed
        return self.cache.match(sequence.adapter, sequence.ids[: sequence.prompt_len])

    def _schedule(self) -> Batch:
        """All decoding sequences, and prefill chunks up to the budget of prompt tokens (oldest first)."""
        budget = self._prefill_tokens
        batch: Batch = []
        for sequence in self.running:
            scored = sequence.params.prompt_logprobs is not None and sequence.computed < sequence.prompt_len
            count = sequence.pending
            if count > 1:
                count = min(count, budget, _OBSERVED_ROWS if scored else count)
                budget -= count
            if count > 0:
                wanted = range(0 if scored else count - 1, count) if scored or count == sequence.pending else range(0)
                ids = sequence.ids[sequence.computed : sequence.computed + count]
                batch.append((sequence, StepRow(sequence.slot, sequence.computed, ids, sequence.adapter, wanted)))
        return batch

    def _finish_completed(self) -> None:
        for sequence in [each for each in self.running if each.finish_reason is not None]:
            self._cache_prefix(sequence)
            result = sequence.result()
            self._leave(sequence)
            sequence.handle.future.set_result(result)

    def _cache_prefix(self, sequence: SequenceState) -> None:
        slots, slot = self._model.slots, sequence.slot
        ids = sequence.ids[: sequence.computed]
        self.cache.insert(sequence.adapter, ids, lambda start, stop: slots.read(slot, start, stop))


ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,127}")


class _Replacement(NamedTuple):
    """A loaded model that takes the place of the served one as soon as nothing is computed."""

    model: ServedModel
    done: Future[None]


class Generator:
    """A served model with its scheduler thread. All public methods may be called from any thread."""

    def __init__(self, config: GeneratorConfig) -> None:
        """Load the model (seconds) and start the thread. Raises StartError."""
        self.config = config
        self.model = in_passing_thread(lambda: ServedModel(config))
        self._first = self.model.directory
        self.tokenizer = self.model.tokenizer
        self.max_model_len = self.model.max_model_len
        self._scheduler = Scheduler(
            self.model,
            max_batch=config.max_batch,
            prefill_tokens=config.prefill_tokens or (256 if self.model.device.type == "cpu" else 2048),
            cache_bytes=config.cache_bytes,
        )
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._adapters: dict[str, LoadedAdapter] = {}
        self._in_flight: Counter[LoadedAdapter | None] = Counter()
        """Requests that are computed, wait, or are being prepared (``pin_adapter``)."""
        self._draining: dict[LoadedAdapter, Future[None]] = {}
        self._inbox: queue.SimpleQueue[SequenceState | _Replacement | None] = queue.SimpleQueue()
        self._replacement: _Replacement | None = None
        self.weights: str | None = None
        """The name of the weights that took the place of the first ones; ``None`` before."""
        self._closing = False
        self._failure: BaseException | None = None
        self.stopped = threading.Event()
        """Set when the thread has ended: after ``close``, or because it failed."""
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: DecodingParams,
        *,
        adapter: str | LoadedAdapter | None = None,
        weights: str | None = "",
        on_delta: DeltaCallback | None = None,
    ) -> RequestHandle:
        """Queue one prompt; the result comes through ``future`` of the handle as a ``Generation``.

        ``adapter`` names a loaded adapter (or is one from ``pin_adapter``), ``None`` is the base model; the request
        finishes on the version it started with, even if that is unloaded meanwhile. ``weights``: those that the prompt
        is meant for, by the value of that attribute; an empty text is any. ``on_delta`` is called in the
        generator's thread for every token and must not block.

        Raises ``NotFound`` for an unknown adapter, ``ServingError`` for a prompt that is empty, too long or outside the
        vocabulary, ``Overloaded`` when the queue is full.
        """
        ids = tuple(prompt_ids)
        self._check_prompt(ids, params)
        limit = min(params.max_tokens, self.max_model_len - len(ids))
        with self._lock:
            self._check_open()
            version = self._find(adapter) if isinstance(adapter, str) else adapter
            if weights not in ("", self.weights):
                raise NotFound(f"The weights were replaced by `{self.weights}` meanwhile.", param="model")
            if self._in_flight.total() >= self.config.max_queue + self.config.max_batch:
                raise Overloaded("The server is overloaded: its queue is full; retry later.")
            sequence = SequenceState(ids, params, version, self.tokenizer, limit, on_delta)
            self._in_flight[version] += 1
            self._inbox.put(sequence)
        return sequence.handle

    def generate(self, prompt_ids: Sequence[int], params: DecodingParams, *, adapter: str | None = None) -> Generation:
        """``submit`` and wait."""
        return self.submit(prompt_ids, params, adapter=adapter).future.result()

    @contextmanager
    def pin_adapter(self, name: str) -> Iterator[LoadedAdapter]:
        """Keep an adapter from being unloaded while a request for it is prepared. Raises NotFound."""
        with self._lock:
            adapter = self._find(name)
            self._in_flight[adapter] += 1
        try:
            yield adapter
        finally:
            with self._lock:
                self._in_flight[adapter] -= 1
                self._inbox.put(None)

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted."""
        return not self._closing and self._failure is None

    def check(self) -> None:
        """Raise ``InfrastructureError`` when the generator has failed, which only a new process mends."""
        if self._failure is not None:
            raise InfrastructureError(f"the generator has stopped, start the server again: {describe(self._failure)}")

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """The loaded adapters, oldest first."""
        with self._lock:
            return tuple(self._adapters.values())

    def load_adapter(self, name: str, path: Path) -> LoadedAdapter:
        """Load a PEFT LoRA directory under a new name; blocks while it is read, generation continues.

        Raises InvalidUserInput (name unfit or taken, too many adapters), NotFound (no adapter in ``path``) or
        ServingError (the adapter does not fit the model).
        """
        if not ADAPTER_NAME.fullmatch(name):
            raise InvalidUserInput(
                f"The lora adapter name {name[:80]!r} is not allowed: use letters, digits and ._@:+-", param="lora_name"
            )
        with self._loading:
            with self._lock:
                self._check_open()
                if name in self._adapters:
                    raise InvalidUserInput(f"The lora adapter '{name}' has already been loaded.", param="lora_name")
                if len(self._adapters) >= self.config.max_adapters:
                    raise InvalidUserInput(
                        f"{self.config.max_adapters} lora adapters are loaded, which is this server's limit; unload "
                        "one first."
                    )
            adapter = in_passing_thread(lambda: self.model.read_adapter(name, path))
            with self._lock:
                self._adapters[name] = adapter
        return adapter

    def unload_adapter(self, name: str) -> Future[None]:
        """Take an adapter out of service; the future is done when its last request in flight is.

        New requests for the name fail at once; a pinned adapter counts as in flight. Raises ``NotFound`` for a
        name that is not loaded.
        """
        with self._lock:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
            drained: Future[None] = Future()
            if self._closing:
                drained.set_result(None)
            else:
                self._draining[adapter] = drained
                self._inbox.put(None)
        return drained

    def replace_model(self, name: str, path: Path) -> None:
        """Serve the weights in ``path``, another directory of the same model, under ``name``; blocks until they are.

        They are loaded beside the old ones, which serve all requests that were submitted until then, to their ends.
        Later ones wait meanwhile. The ``path`` of the first weights may be the hub name that they were loaded by.
        Raises ``InvalidUserInput`` (adapters are loaded) or ``ServingError`` (the weights cannot be served, or are
        those of another model); then the old ones stay.
        """
        with self._loading:
            with self._lock:
                self._check_open()
                if self._adapters or self._draining:
                    raise InvalidUserInput("LoRA adapters of the served weights are loaded; unload them first.")
            waiting = _Replacement(self._read_model(path), Future())
            with self._lock:
                self._check_open()
                self.weights = name
                self._inbox.put(waiting)
            waiting.done.result()

    def began_with(self, path: Path) -> bool:
        """Whether that is the directory, or the hub name, of the first weights."""
        return path in (Path(self.config.model), self._first.absolute())

    def _read_model(self, path: Path) -> ServedModel:
        first = self.began_with(path)
        directory = self._first if first else path
        if not is_file(directory / "config.json"):
            raise NotFound(f"There is no model in {str(directory)[:200]}.", param="model_path")
        config = self.config.model_copy(update={"model": self.config.model if first else str(path)})
        try:
            fresh = in_passing_thread(lambda: ServedModel(config, directory))
        except (StartError, RuntimeError) as error:  # RuntimeError: torch has no memory for both
            raise ServingError(f"The weights cannot be served: {describe(error)}", param="model_path") from error
        alike = fresh.tokenizer.get_vocab() == self.tokenizer.get_vocab() and fresh.vocabulary == self.model.vocabulary
        if not alike or fresh.max_model_len < self.max_model_len:
            raise ServingError(f"{path} is another model: its vocabulary or context differs.", param="model_path")
        return fresh

    def close(self) -> None:
        """Cancel all requests and end the thread. Idempotent."""
        with self._lock:
            self._closing = True
            self._inbox.put(None)
        self._thread.join()

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, name: str) -> LoadedAdapter:
        adapter = self._adapters.get(name)
        if adapter is None:
            raise NotFound(f"The model `{name}` does not exist.", param="model")
        return adapter

    def _check_open(self) -> None:
        if self._failure is not None:
            raise Overloaded(f"The generator has stopped: {type(self._failure).__name__}: {self._failure}")
        if self._closing:
            raise Overloaded("The server is stopping.")

    def _check_prompt(self, ids: tuple[int, ...], params: DecodingParams) -> None:
        if not ids:
            raise ServingError("The prompt is empty.", param="prompt")
        if len(ids) >= self.max_model_len:
            raise ServingError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your request has "
                f"{len(ids)} input tokens. Please reduce the length of the input messages.",
                param="input_tokens",
            )
        if (bad := next((i for i in ids if not 0 <= i < self.model.vocabulary), None)) is not None:
            raise ServingError(f"Token id {bad} is out of vocabulary", param="prompt")

    def _run(self) -> None:
        try:
            with boundary(FailureKind.MODEL, "generator"):
                while not self._closing:
                    self._take_in()
                    self._count_down(self._scheduler.step())
        except RLError as error:  # callers must not wait for ever
            self._failure = error
            _LOG.critical("the generator has stopped", exc_info=error.__cause__)
        finally:
            with self._lock:
                self._closing = True
            while not self._inbox.empty():
                self._enqueue(self._inbox.get())
            self._count_down(self._scheduler.abort())
            for drained in self._draining.values():
                drained.set_result(None)
            if self._replacement is not None:
                self._replacement.done.set_exception(Overloaded("The server is stopping."))
            self.stopped.set()

    def _take_in(self) -> None:
        """Move submitted requests to the scheduler, waiting while it is idle.

        Requests behind a replacement stay in the inbox until it is done: only the new weights compute them.
        """
        if self._scheduler.idle and self._replacement is None:
            self._enqueue(self._next_item())
        while self._replacement is None and not self._inbox.empty():
            self._enqueue(self._inbox.get())
        if self._scheduler.idle and self._replacement is not None:
            (self.model, done), self._replacement = self._replacement, None
            self._scheduler.use(self.model)
            forget_unused()
            done.set_result(None)

    def _next_item(self) -> SequenceState | _Replacement | None:
        """The next submitted request. After ``rest_after`` idle seconds the KV cache's memory is released first."""
        try:
            return self._inbox.get(timeout=self.config.rest_after)
        except queue.Empty:
            self._scheduler.release_memory()
            return self._inbox.get()

    def _enqueue(self, item: SequenceState | _Replacement | None) -> None:
        """Pass a request to the scheduler; ``None`` only wakes the thread up."""
        if isinstance(item, _Replacement):
            self._replacement = item
        elif item is not None:
            self._scheduler.waiting.append(item)

    def _count_down(self, left: Sequence[SequenceState]) -> None:
        """Count finished sequences down, and complete the unloading of adapters that nothing in flight needs."""
        with self._lock:
            for sequence in left:
                self._in_flight[sequence.adapter] -= 1
            done = {each: self._draining.pop(each) for each in tuple(self._draining) if not self._in_flight[each]}
            for adapter in done:
                del self._in_flight[adapter]
        for adapter, drained in done.items():
            self._scheduler.cache.drop(adapter)
            drained.set_result(None)
