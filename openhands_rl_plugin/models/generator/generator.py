"""The generation core: a thread that owns the model; requests and adapters come from any thread.

with Generator(GeneratorConfig(model="path/to/model")) as generator:
    generator.load_adapter("policy-v000001", Path("adapters/policy-v000001")).result()
    ticket = generator.submit(prompt_ids, SamplingParams(max_tokens=64), adapter="policy-v000001")
    answer = ticket.future.result()        # or: await asyncio.wrap_future(ticket.future)
    answer.token_ids, answer.logprobs, answer.text, answer.finish_reason
"""

import queue
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.errors import InvalidUserInput, NotFound, Overloaded, ServingError
from openhands_rl_plugin.models.generator.lora import Adapter
from openhands_rl_plugin.models.generator.model import ServedModel
from openhands_rl_plugin.models.generator.sampling import SamplingParams
from openhands_rl_plugin.models.generator.scheduler import Scheduler
from openhands_rl_plugin.models.generator.sequence import DeltaSink, Generation, SequenceState, Ticket

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,127}")


class Generator:
    """A served model with its scheduler thread. All public methods may be called from any thread."""

    def __init__(self, config: GeneratorConfig) -> None:
        """Load the model (seconds) and start the thread. Raises StartError."""
        self.config = config
        self.model = ServedModel(config)
        self.tokenizer = self.model.tokenizer
        self.max_len = self.model.max_len
        self._scheduler = Scheduler(
            self.model,
            max_batch=config.max_batch,
            prefill_tokens=config.prefill_tokens or (256 if self.model.device.type == "cpu" else 2048),
            cache_bytes=config.cache_bytes,
        )
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._adapters: dict[str, Adapter] = {}
        self._in_flight: Counter[Adapter | None] = Counter()
        self._held: Counter[Adapter] = Counter()
        self._draining: dict[Adapter, Future[None]] = {}
        self._inbox: queue.SimpleQueue[SequenceState | None] = queue.SimpleQueue()
        self._closing = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        adapter: str | Adapter | None = None,
        on_delta: DeltaSink | None = None,
    ) -> Ticket:
        """Queue one prompt; the answer comes through the ticket's future as a `Generation`.

        `adapter` names a loaded adapter (or is one that `hold` gave), None is the base model; the request finishes on
        the version it started with whatever is loaded or unloaded meanwhile. `on_delta` is called in the generator's
        thread for every token and must return at once. Raises NotFound for an unknown adapter, ServingError for a
        prompt that is empty, too long or not of this vocabulary, Overloaded when the queue is full.
        """
        ids = tuple(prompt_ids)
        self._check_prompt(ids, params)
        limit = min(params.max_tokens, self.max_len - len(ids))
        with self._lock:
            self._check_open()
            version = self._find(adapter) if isinstance(adapter, str) else adapter
            if self._in_flight.total() >= self.config.max_queue + self.config.max_batch:
                raise Overloaded("The server is overloaded: its queue is full; retry later.")
            sequence = SequenceState(ids, params, version, self.tokenizer, limit, on_delta)
            self._in_flight[version] += 1
            self._inbox.put(sequence)
        return sequence.ticket

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, adapter: str | None = None) -> Generation:
        """`submit` and wait."""
        return self.submit(prompt_ids, params, adapter=adapter).future.result()

    @contextmanager
    def hold(self, name: str) -> Iterator[Adapter]:
        """Keep an adapter from being unloaded while a request for it is prepared. Raises NotFound."""
        with self._lock:
            adapter = self._find(name)
            self._held[adapter] += 1
        try:
            yield adapter
        finally:
            with self._lock:
                self._held[adapter] -= 1
                self._inbox.put(None)

    @property
    def healthy(self) -> bool:
        """Whether requests are still taken."""
        return not self._closing and self._broken is None

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The loaded adapters, oldest first."""
        with self._lock:
            return tuple(self._adapters.values())

    def load_adapter(self, name: str, path: Path) -> Adapter:
        """Load a PEFT LoRA directory under a new name; blocks while it is read, generation goes on.

        Raises InvalidUserInput (name unfit or taken, too many adapters), NotFound (no adapter in `path`) or
        ServingError (the adapter does not fit the model).
        """
        if not _NAME.fullmatch(name):
            raise InvalidUserInput(
                f"The lora adapter name {name[:80]!r} is not allowed: use letters, digits and ._@:+-", param="lora_name"
            )
        with self._loading:
            with self._lock:
                self._check_open()
                self._check_new(name)
            adapter = self.model.read_adapter(name, path)
            with self._lock:
                self._adapters[name] = adapter
        return adapter

    def unload_adapter(self, name: str) -> "Future[None]":
        """Take an adapter out of service; the future is done when its last request in flight is.

        New requests for the name fail at once; requests that `hold` it count as in flight. Raises NotFound for a name
        that is not loaded.
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

    def close(self) -> None:
        """Cancel what is under way and end the thread. Idempotent."""
        with self._lock:
            self._closing = True
            self._inbox.put(None)
        self._thread.join()
        self.model.close()

    def __enter__(self) -> "Generator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, name: str) -> Adapter:
        adapter = self._adapters.get(name)
        if adapter is None:
            raise NotFound(f"The model `{name}` does not exist.", param="model")
        return adapter

    def _check_open(self) -> None:
        if self._broken is not None:
            raise Overloaded(f"The generator has stopped: {type(self._broken).__name__}: {self._broken}")
        if self._closing:
            raise Overloaded("The server is stopping.")

    def _check_new(self, name: str) -> None:
        if name in self._adapters:
            raise InvalidUserInput(f"The lora adapter '{name}' has already been loaded.", param="lora_name")
        if len(self._adapters) >= self.config.max_adapters:
            raise InvalidUserInput(
                f"{self.config.max_adapters} lora adapters are loaded, which is this server's limit; unload one first."
            )

    def _check_prompt(self, ids: tuple[int, ...], params: SamplingParams) -> None:
        if not ids:
            raise ServingError("The prompt is empty.", param="prompt")
        if len(ids) >= self.max_len:
            raise ServingError(
                f"This model's maximum context length is {self.max_len} tokens. However, your request has {len(ids)} "
                "input tokens. Please reduce the length of the input messages.",
                param="input_tokens",
            )
        if params.max_tokens < 1:
            raise ServingError(f"max_tokens must be at least 1, got {params.max_tokens}.", param="max_tokens")
        top = self.model.vocabulary
        bad = next((i for i in ids if not 0 <= i < top), None)
        if bad is not None:
            raise ServingError(f"Token id {bad} is out of vocabulary", param="prompt")

    def _run(self) -> None:
        try:
            while self._receive():
                self._settle(self._scheduler.step())
        except BaseException as error:  # the thread is the last line of defence: callers must not wait for ever
            self._broken = error
            raise
        finally:
            with self._lock:
                self._closing = True
            while not self._inbox.empty():
                self._take(self._inbox.get())
            self._settle(self._scheduler.abort())
            for drained in self._draining.values():
                drained.set_result(None)

    def _receive(self) -> bool:
        """Take in what was submitted, waiting when there is nothing to compute; False ends the thread."""
        if self._scheduler.idle:
            self._take(self._awaited())
        while not self._inbox.empty():
            self._take(self._inbox.get())
        self._settle(())
        return not self._closing

    def _awaited(self) -> SequenceState | None:
        """What comes next. When nothing does for a while, others may have the memory: a trainer, say."""
        try:
            return self._inbox.get(timeout=self.config.rest_after)
        except queue.Empty:
            self._scheduler.rest()
            return self._inbox.get()

    def _take(self, item: SequenceState | None) -> None:
        """None only wakes the thread up."""
        if item is not None:
            self._scheduler.add(item)

    def _settle(self, left: Sequence[SequenceState]) -> None:
        """Count out the sequences that left; finish the unloading of adapters that nothing uses any more."""
        with self._lock:
            for sequence in left:
                self._in_flight[sequence.adapter] -= 1
            done = [a for a in self._draining if not self._in_flight[a] and not self._held[a]]
            futures = [self._draining.pop(adapter) for adapter in done]
            for adapter in done:
                del self._in_flight[adapter], self._held[adapter]
        for adapter, drained in zip(done, futures, strict=True):
            self._scheduler.cache.drop(adapter)
            drained.set_result(None)
