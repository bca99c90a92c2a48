"""The generator's metrics, under vLLM's names where it has the same."""

from __future__ import annotations

import time
from collections.abc import Callable

from openhands_rl_plugin.core.servers.metrics import Metrics, Samples
from openhands_rl_plugin.models.generator.sequence import SequenceState


class GeneratorMetrics:
    """Counts sequences as they end. ``model``: the name of the served weights."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.metrics = metrics
        self._labels = {"model_name": model}
        self._prompt = metrics.counter("vllm:prompt_tokens_total", "Prompt tokens of ended requests.")
        self._sampled = metrics.counter("vllm:generation_tokens_total", "Sampled tokens of ended requests.")
        self._asked = metrics.counter("vllm:prefix_cache_queries_total", "Prompt tokens that were looked up.")
        self._hits = metrics.counter("vllm:prefix_cache_hits_total", "Prompt tokens that were in the prefix cache.")
        self._ended = metrics.counter("vllm:request_success_total", "Finished requests by reason; abort: they did not.")
        self._first = metrics.histogram("vllm:time_to_first_token_seconds", "Seconds to the first token.")
        self._whole = metrics.histogram("vllm:e2e_request_latency_seconds", "Seconds to the last token.")
        for each in (self._prompt, self._sampled, self._asked, self._hits):
            each.add(0, **self._labels)

    def read(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A value that is read when it is asked for; by its name, a gauge or a counter."""

        def samples() -> Samples:
            return [(self._labels, value())]

        self.metrics.read(name, about, samples, "counter" if name.endswith("_total") else "gauge")

    def ended(self, sequence: SequenceState) -> None:
        """Count a sequence that left the scheduler: finished, failed or cancelled."""
        reason = sequence.finish_reason or "abort"
        self._ended.add(1, finished_reason=reason, **self._labels)
        self._prompt.add(sequence.prompt_len, **self._labels)
        self._sampled.add(len(sequence.ids) - sequence.prompt_len, **self._labels)
        self._asked.add(sequence.prompt_len, **self._labels)
        self._hits.add(sequence.cached, **self._labels)
        if sequence.first_token is not None:
            self._first.observe(sequence.first_token - sequence.submitted, **self._labels)
        self._whole.observe(time.monotonic() - sequence.submitted, **self._labels)
