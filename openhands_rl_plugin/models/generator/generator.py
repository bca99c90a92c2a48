"""The generator: a scheduler thread that owns the model; requests and adapters come from any thread.

with Generator(GeneratorConfig(model="path/to/model")) as generator:
    generator.load_adapter("policy-v000001", Path("adapters/policy-v000001")).result()
    ticket = generator.submit(prompt_ids, SamplingParams(max_tokens=64), adapter="policy-v000001")
    answer = ticket.future.result()        # or: await asyncio.wrap_future(ticket.future)
    answer.token_ids, answer.logprobs, answer.text, answer.finish_reason
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from openhands_rl_plugin.core.errors import InfrastructureError, RLError, boundary, describe
from openhands_rl_plugin.core.files import is_file
from openhands_rl_plugin.core.machine import forget_unused
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.errors import (
    InvalidUserInput,
    NotFound,
    Overloaded,
    ServingError,
    StartError,
)
from openhands_rl_plugin.models.generator.lora import LoadedAdapter
from openhands_rl_plugin.models.generator.model import ServedModel
from openhands_rl_plugin.models.generator.scheduler import Scheduler
from openhands_rl_plugin.models.generator.sequence import (
    DecodingParams,
    DeltaCallback,
    Generation,
    RequestHandle,
    SequenceState,
)
from openhands_rl_plugin.models.generator.threads import in_passing_thread

_BOUNDS = (0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class GeneratorMetrics(Collector):
    """Counts sequences as they end. ``model``: the name of the served weights."""

    def __init__(self, model: str) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._model = model
        self._read: list[tuple[str, str, Callable[[], float]]] = []
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests.")
        self._sampled = self._counter("vllm:generation_tokens", "Sampled tokens of ended requests.")
        self._asked = self._counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens that were in the prefix cache.")
        about, labels = "Finished requests by reason; abort: they did not.", ("model_name", "finished_reason")
        self._ended = prometheus_client.Counter("vllm:request_success", about, labels, registry=self.registry)
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Seconds to the first token.")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Seconds to the last token.")
        self.registry.register(self)

    def _counter(self, name: str, about: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(name, about, ("model_name",), registry=self.registry).labels(self._model)

    def _histogram(self, name: str, about: str) -> prometheus_client.Histogram:
        histogram = prometheus_client.Histogram(name, about, ("model_name",), buckets=_BOUNDS, registry=self.registry)
        return histogram.labels(self._model)

    def read(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A value that is read when it is asked for; by its name, a gauge or a counter."""
        self._read.append((name, about, value))

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """What is read when it is asked for."""
        for name, about, value in self._read:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, about, labels=("model_name",))
            family.add_metric((self._model,), value())
            yield family

    def ended(self, sequence: SequenceState) -> None:
        """Count a sequence that left the scheduler: finished, failed or cancelled."""
        self._ended.labels(self._model, sequence.finish_reason or "abort").inc()
        self._prompt.inc(sequence.prompt_len)
        self._sampled.inc(len(sequence.ids) - sequence.prompt_len)
        self._asked.inc(sequence.prompt_len)
        self._hits.inc(sequence.cached)
        if sequence.first_token is not None:
            self._first.observe(sequence.first_token - sequence.submitted)
        self._whole.observe(time.monotonic() - sequence.submitted)


_LOG = redacting_logger(__name__)
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,127}")


@dataclass(frozen=True)
class _Replacement:
    """A loaded model that takes the place of the served one as soon as nothing is computed."""

    model: ServedModel
    done: Future[None] = field(default_factory=Future)


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
        self.metrics = self._measured()
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._adapters: dict[str, LoadedAdapter] = {}
        self._in_flight: Counter[LoadedAdapter | None] = Counter()
        self._pins: Counter[LoadedAdapter] = Counter()
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

    def _measured(self) -> GeneratorMetrics:
        told = GeneratorMetrics(self.config.base_name)
        scheduler, most = self._scheduler, self.config.max_batch * self.max_model_len
        told.read("vllm:num_requests_running", "Requests that are computed.", lambda: scheduler.counts[0])
        told.read("vllm:num_requests_waiting", "Requests that wait for a place.", lambda: scheduler.counts[1])
        told.read("vllm:kv_cache_usage_perc", "Share of the slots in use; 1 is all.", lambda: scheduler.tokens / most)
        return told

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
            self._pins[adapter] += 1
        try:
            yield adapter
        finally:
            with self._lock:
                self._pins[adapter] -= 1
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
                self._check_new(name)
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
            waiting = _Replacement(self._read_model(path))
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
        name = self.config.model if first else str(path)
        try:
            config = self.config.model_copy(update={"model": name})
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

    def _check_new(self, name: str) -> None:
        if name in self._adapters:
            raise InvalidUserInput(f"The lora adapter '{name}' has already been loaded.", param="lora_name")
        if len(self._adapters) >= self.config.max_adapters:
            raise InvalidUserInput(
                f"{self.config.max_adapters} lora adapters are loaded, which is this server's limit; unload one first."
            )

    def _check_prompt(self, ids: tuple[int, ...], params: DecodingParams) -> None:
        if not ids:
            raise ServingError("The prompt is empty.", param="prompt")
        if len(ids) >= self.max_model_len:
            raise ServingError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your request has "
                f"{len(ids)} input tokens. Please reduce the length of the input messages.",
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
            with boundary(FailureKind.MODEL, "generator"):
                while self._poll_inbox():
                    self._finish_requests(self._scheduler.step())
        except RLError as error:  # callers must not wait for ever
            self._failure = error
            _LOG.critical("the generator has stopped", exc_info=error.__cause__)
        finally:
            with self._lock:
                self._closing = True
            while not self._inbox.empty():
                self._enqueue(self._inbox.get())
            self._finish_requests(self._scheduler.abort())
            for drained in self._draining.values():
                drained.set_result(None)
            if self._replacement is not None:
                self._replacement.done.set_exception(Overloaded("The server is stopping."))
            self.stopped.set()

    def _poll_inbox(self) -> bool:
        """Move submitted requests to the scheduler, waiting while it is idle; False ends the thread."""
        if self._scheduler.idle and self._replacement is None:
            self._enqueue(self._next_item())
        while self._replacement is None and not self._inbox.empty():
            self._enqueue(self._inbox.get())
        if self._scheduler.idle and self._replacement is not None:
            self._replace(self._replacement)
        self._finish_requests(())
        return not self._closing

    def _replace(self, replacement: _Replacement) -> None:
        """Requests after it are still in the inbox, so they are computed with the new weights only."""
        self._replacement = None
        self.model = replacement.model
        self._scheduler.use(replacement.model)
        forget_unused()
        replacement.done.set_result(None)

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
            self._scheduler.add(item)

    def _finish_requests(self, left: Sequence[SequenceState]) -> None:
        """Count finished sequences down, and complete the unloading of adapters without requests or pins."""
        with self._lock:
            for sequence in left:
                self.metrics.ended(sequence)
                self._in_flight[sequence.adapter] -= 1
            done = [a for a in self._draining if not self._in_flight[a] and not self._pins[a]]
            futures = [self._draining.pop(adapter) for adapter in done]
            for adapter in done:
                del self._in_flight[adapter], self._pins[adapter]
        for adapter, drained in zip(done, futures, strict=True):
            self._scheduler.cache.drop(adapter)
            drained.set_result(None)
