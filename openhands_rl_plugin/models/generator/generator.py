"""The generator: a thread that owns the model and batches continuously; requests and adapters come from any thread.

with Generator(GeneratorConfig(model="path/to/model")) as generator:
    generator.load_adapter("policy-v000001", Path("adapters/policy-v000001"))
    future = generator.submit(prompt_ids, DecodingParams(max_tokens=64), adapter="policy-v000001")
    answer = future.result()        # or: await asyncio.wrap_future(future)
    answer.token_ids, answer.logprobs, answer.text, answer.finish_reason
"""

from __future__ import annotations

import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.machine import return_freed_memory
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.models.generator.config import (
    GenerationFailed,
    GeneratorConfig,
    InvalidUserInput,
    NotFound,
    Overloaded,
    ServingError,
)
from openhands_rl_plugin.models.generator.model import LoadedAdapter, ServedModel, StepRow
from openhands_rl_plugin.models.generator.sequence import (
    DecodingParams,
    DeltaCallback,
    Generation,
    sample,
    score_tokens,
)

_LOG = redacting_logger(__name__)
BLOCK_TOKENS = 16
_BLOCK_BYTES = 2048
"""Memory of Python and torch for a block, in addition to its keys and values."""
# Rows of float32 logits per step for prompt logprobs: 64 rows of a vocabulary of 150,000 take 38 MB.
_OBSERVED_ROWS = 64
# On a CPU, while the server is busy: what was freed lies between what is in use. To return it takes 10 ms.
_SECONDS_OF_FREED_MEMORY = 5.0
_REST_AFTER = 5.0
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,127}")


def in_passing_thread[T](work: Callable[[], T]) -> T:
    """The result of ``work``, which uses torch, in a thread that ends with it.

    Each thread that has computed in parallel keeps a team of OpenMP threads as long as it lives. Where all teams
    together have more threads than there are processors, libgomp hardly spins any more, and every parallel region costs
    a wake-up: a model that was loaded by a thread which lives on takes 1.4 times as long for a step in another thread
    (2 cores, SmolLM2-135M, 20 sequences: 170 to 210 ms instead of 110 to 140).
    """
    with ThreadPoolExecutor(1, "passing") as thread:
        return thread.submit(work).result()


class PrefixCache:
    """Keys and values of blocks of ids, each behind the same earlier ids under the same adapter.

    A block's key is a digest of its adapter and of all ids up to its end. Evicts the least recently used blocks when
    ``max_bytes`` is exceeded. Not thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes = 0
        # Oldest first. A prefix is touched from its end, so a block is never older than those that follow it.
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()

    def match(self, owner: LoadedAdapter | None, ids: Sequence[int]) -> tuple[list[Tensor], bytes | None]:
        """The blocks of the longest cached prefix of ``ids`` (never all of it: the last token must be computed).

        Then the key of the first full block that is not cached, ``None`` where all are: two prompts that need the same
        one are recognised by it.
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
            self._bytes -= self._blocks.popitem(last=False)[1].nbytes + _BLOCK_BYTES

    def _keys(self, owner: LoadedAdapter | None, ids: Sequence[int], limit: int) -> list[bytes]:
        data, keys = array("q", ids).tobytes(), list[bytes]()
        digest = blake2b(str(owner.number if owner else 0).encode(), digest_size=16)
        for at in range(limit // BLOCK_TOKENS if self.max_bytes else 0):
            digest.update(data[at * BLOCK_TOKENS * 8 : (at + 1) * BLOCK_TOKENS * 8])
            keys.append(digest.digest())
        return keys

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)


class Generator:
    """A served model with the thread that computes. All public methods may be called from any thread."""

    def __init__(self, config: GeneratorConfig) -> None:
        """Load the model (seconds) and start the thread. Raises StartError."""
        self.config = config
        self.model = in_passing_thread(lambda: ServedModel(config))
        self.tokenizer = self.model.tokenizer
        self.max_model_len = self.model.max_model_len
        self._prefill_tokens = config.prefill_tokens or (256 if self.model.device.type == "cpu" else 2048)
        self._cache = PrefixCache(config.cache_bytes)
        self._free = set(range(config.max_batch))
        self._waiting: list[Generation] = []
        self._running: list[Generation] = []
        self._adapters: dict[str, LoadedAdapter] = {}
        self._loading = threading.Lock()
        self._changed = threading.Condition()
        self._returned = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: DecodingParams,
        *,
        adapter: str | LoadedAdapter | None = None,
        on_delta: DeltaCallback | None = None,
    ) -> Future[Generation]:
        """Queue one prompt. To cancel the future stops the request at the next step.

        ``adapter``: a loaded adapter, or the name of one; ``None`` is the base model. The request finishes on the
        version it started with, even if that is unloaded meanwhile. ``on_delta`` is called in the generator's thread
        for every token and must not block.

        Raises ``NotFound`` for an unknown adapter, ``ServingError`` for a prompt that is empty or outside the
        vocabulary, or does not fit with its answer, ``Overloaded`` when the queue is full or the generator closed.
        """
        ids, answer = tuple(prompt_ids), params.max_tokens or 1
        if not ids or not all(0 <= token < self.model.vocabulary for token in ids):
            problem = "has a token id that is out of vocabulary" if ids else "is empty"
            raise ServingError(f"The prompt {problem}.", param="prompt")
        if len(ids) + answer > self.max_model_len:
            raise ServingError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{answer + len(ids)} tokens ({len(ids)} in the messages, {answer} in the completion). Please reduce "
                "the length of the messages or completion.",
                param="max_tokens",
            )
        params = replace(params, max_tokens=params.max_tokens or self.max_model_len - len(ids))
        with self._changed:
            self._check_open()
            version = self.adapter(adapter) if isinstance(adapter, str) else adapter
            if len(self.in_flight) >= self.config.max_queue + self.config.max_batch:
                raise Overloaded("The server is overloaded: its queue is full; retry later.")
            made = Generation(ids, params, self.tokenizer, version, on_delta)
            self._waiting.append(made)
            self._changed.notify_all()
        return made.future

    def generate(self, prompt_ids: Sequence[int], params: DecodingParams, *, adapter: str | None = None) -> Generation:
        """``submit`` and wait."""
        return self.submit(prompt_ids, params, adapter=adapter).result()

    @property
    def in_flight(self) -> list[Generation]:
        """Requests that wait or are computed."""
        return [*self._waiting, *self._running]

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """The loaded adapters, oldest first."""
        return tuple(self._adapters.values())

    def adapter(self, name: str) -> LoadedAdapter:
        """The loaded adapter of that name. Raises ``NotFound``."""
        if (adapter := self._adapters.get(name)) is None:
            raise NotFound(f"The model `{name}` does not exist.", param="model")
        return adapter

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
            self._check_open()
            if name in self._adapters:
                raise InvalidUserInput(f"The lora adapter '{name}' has already been loaded.", param="lora_name")
            if (most := self.config.max_adapters) <= len(self._adapters):
                raise InvalidUserInput(
                    f"{most} lora adapters are loaded, which is this server's limit; unload one first."
                )
            self._adapters[name] = adapter = in_passing_thread(lambda: self.model.read_adapter(name, path))
        return adapter

    def unload_adapter(self, name: str) -> None:
        """Take an adapter out of service; blocks until its last request in flight has ended.

        New requests for the name fail at once. Raises ``NotFound`` for a name that is not loaded.
        """
        with self._changed:
            if (adapter := self._adapters.pop(name, None)) is None:
                raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
            self._changed.wait_for(lambda: all(each.adapter is not adapter for each in self.in_flight))

    def close(self) -> None:
        """Refuse all requests, also those in flight, and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closing:
            raise Overloaded("The server is stopping.")

    # What follows runs in the generator's thread.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
        finally:  # callers must not wait for ever
            with self._changed:
                self._closing = True
            for each in self.in_flight:
                self._end(each, Overloaded("The server is stopping."))

    def _wait_for_work(self) -> bool:
        """Whether to go on. After five idle seconds the memory of running sequences is given back."""

        def busy() -> bool:
            return bool(self._waiting or self._running or self._closing)

        with self._changed:
            if not self._changed.wait_for(busy, _REST_AFTER):
                self.model.slots.clear()
                return_freed_memory()
                if self.model.device.type == "cuda":
                    torch.cuda.empty_cache()
                self._changed.wait_for(busy)
            return not self._closing

    @torch.inference_mode()
    def _step(self) -> None:
        """Admit sequences, compute one step, sample, and end what is complete. One that fails ends all that run."""
        for each in self.in_flight:
            if each.future.cancelled():
                self._end(each)
        try:
            with boundary(FailureKind.MODEL, "generation step"):
                self._admit()
                if self._running:
                    self._compute(self._schedule())
                finished = [each for each in self._running if each.finish_reason is not None]
                for each in finished:
                    self._cache_prefix(each)
                    self._end(each)
        except CaughtFailure as caught:
            for each in tuple(self._running):
                self._fail(each, caught)
            return
        overdue = time.monotonic() - self._returned > _SECONDS_OF_FREED_MEMORY
        if finished and overdue and self.model.device.type == "cpu":
            return_freed_memory()
            self._returned = time.monotonic()

    def _admit(self) -> None:
        """Assign free slots to waiting sequences, oldest first, and copy the cached prefixes of their prompts.

        A sequence whose next block is being computed for another one waits for it: of equal prompts that arrive
        together (several samples of one turn) only the first is computed.
        """
        under_way = {self._cached(each)[1] for each in self._running if each.pending > 1} if self._waiting else set()
        for each in tuple(self._waiting):
            if not self._free:
                return
            blocks, missing = self._cached(each)
            if missing is not None and missing in under_way:
                continue
            under_way.add(missing)
            each.slot = min(self._free)
            self._free.remove(each.slot)
            self._running.append(each)
            self._waiting.remove(each)
            self.model.slots.ensure(len(each.ids))
            for index, block in enumerate(blocks):
                self.model.slots.write(each.slot, index * BLOCK_TOKENS, block)
            each.computed = each.cached_tokens = len(blocks) * BLOCK_TOKENS

    def _cached(self, each: Generation) -> tuple[list[Tensor], bytes | None]:
        if each.prompt is not None:
            return [], None  # every position must be computed
        return self._cache.match(each.adapter, each.prompt_ids)

    def _schedule(self) -> list[tuple[Generation, StepRow]]:
        """All decoding sequences, and prefill chunks up to the budget of prompt tokens (oldest first)."""
        budget = self._prefill_tokens
        batch: list[tuple[Generation, StepRow]] = []
        for each in self._running:
            scored = each.prompt is not None and each.computed < len(each.prompt_ids)
            count = each.pending
            if count > 1:
                count = min(count, budget, _OBSERVED_ROWS if scored else count)
                budget -= count
            if count > 0:
                wanted = range(0 if scored else count - 1, count) if scored or count == each.pending else range(0)
                ids = each.ids[each.computed : each.computed + count]
                batch.append((each, StepRow(each.slot, each.computed, ids, each.adapter, wanted)))
        return batch

    def _compute(self, batch: Sequence[tuple[Generation, StepRow]]) -> None:
        logits = self.model.step([row for _, row in batch])
        offset = 0
        ready: list[Generation] = []
        indices: list[int] = []
        for each, row in batch:
            following = each.prompt_ids[row.start + 1 : row.stop + 1]
            if following and each.prompt is not None:
                rows = logits[offset : offset + len(following)]
                each.prompt += score_tokens(rows, following, each.params.prompt_logprobs or 0)
            offset += len(row.wanted)
            each.computed = row.stop
            if not each.pending:
                ready.append(each)
                indices.append(offset - 1)
        if not ready:
            return
        rows = logits if indices == list(range(logits.shape[0])) else logits[indices]
        chosen = sample(rows, [each.params for each in ready], [each.random for each in ready])
        for each, token in zip(ready, chosen, strict=True):
            try:
                with boundary(FailureKind.MODEL, "generation of one sequence"):
                    if not each.sampled:
                        self._cache_prefix(each)
                    each.append(token, self.model.eos_ids)
            except CaughtFailure as caught:
                self._fail(each, caught)

    def _cache_prefix(self, each: Generation) -> None:
        slots = self.model.slots
        self._cache.insert(each.adapter, each.ids[: each.computed], lambda a, b: slots.read(each.slot, a, b))

    def _fail(self, each: Generation, caught: CaughtFailure) -> None:
        _LOG.error("a sequence failed: %s", caught.failure.message, exc_info=caught.__cause__)
        self._end(each, GenerationFailed(f"The generation failed: {caught.failure.message}"))

    def _end(self, each: Generation, error: ServingError | None = None) -> None:
        """Take a sequence out; its slot is free again, and its future done."""
        with self._changed:
            for place in (self._waiting, self._running):
                if each in place:
                    place.remove(each)
            if each.slot >= 0:
                self._free.add(each.slot)
            if each.future.set_running_or_notify_cancel():
                each.future.set_exception(error) if error else each.future.set_result(each)
            self._changed.notify_all()
