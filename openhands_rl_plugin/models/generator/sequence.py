"""One request inside the generator: its handle, its state, its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from openhands_rl_plugin.models.generator.lora import LoadedAdapter
from openhands_rl_plugin.models.generator.sampling import DecodingParams, RandomNumbers, SampledToken, ScoredToken


class Detokenizer:
    """Turns sampled token ids into text as they come and finds stop strings.

    ``text`` is what may be shown. Until ``finish``, an end that might grow into a stop string is withheld from it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: Sequence[str]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._whole = ""
        self.text = ""
        self.stopped_by: str | None = None

    def add(self, token: int) -> bool:
        """Take one more token; True when a stop string is complete (it and what follows are cut)."""
        piece = self._stream.step(self._backend, token)
        if not piece:
            return False
        searched = max(0, len(self._whole) - max((len(s) for s in self._stop), default=0))
        self._whole += piece
        hits = [(at, s) for s in self._stop if (at := self._whole.find(s, searched)) >= 0]
        if hits:
            at, self.stopped_by = min(hits)
            self.text = self._whole[:at]
            return True
        self.text = self._whole[: len(self._whole) - self._withheld()]
        return False

    def finish(self, whole: str) -> None:
        """Settle on the final text; ``whole`` is all tokens decoded at once (unfinished characters included)."""
        if self.stopped_by is None:
            self.text = whole

    def _withheld(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            tail = self._whole[max(0, len(self._whole) - len(stop) + 1) :]
            at = tail.find(stop[0])
            while at >= 0 and not stop.startswith(tail[at:]):
                at = tail.find(stop[0], at + 1)
            longest = max(longest, len(tail) - at if at >= 0 else 0)
        return longest


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    ``token_ids`` are exactly the sampled ids, including the end-of-sequence token; ``sampled[i]`` has the logprob of
    ``token_ids[i]`` at temperature 1, before top-p and top-k. ``text`` has special tokens and stop strings removed.
    ``prompt``: the prompt tokens' logprobs, ``None`` for the first token; only with ``prompt_logprobs``.
    ``cached_tokens``: prompt tokens whose keys and values were re-used. ``adapter``: the version sampled from.
    """

    prompt_ids: tuple[int, ...]
    sampled: tuple[SampledToken, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt: tuple[ScoredToken | None, ...] | None
    cached_tokens: int
    adapter: str | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The sampled ids."""
        return tuple(s.token for s in self.sampled)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The sampled ids' logprobs."""
        return tuple(s.logprob for s in self.sampled)


@dataclass(frozen=True)
class Delta:
    """New tokens of an unfinished generation, and the text that can be shown with them."""

    sampled: tuple[SampledToken, ...]
    text: str


DeltaCallback = Callable[[Delta], None]


@dataclass(eq=False)
class RequestHandle:
    """A submitted request: wait for ``future``, or ``cancel()`` it."""

    future: Future[Generation]
    _cancelled: list[bool] = field(default_factory=lambda: [False])

    def __post_init__(self) -> None:
        # The scheduler sets the result; a caller that stops waiting must not cancel the future under it.
        self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        """Stop at the next step; ``future`` then raises ``RequestCancelled``. No effect when finished."""
        self._cancelled[0] = True

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._cancelled[0]


class SequenceState:
    """A request's state in the scheduler."""

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        params: DecodingParams,
        adapter: LoadedAdapter | None,
        tokenizer: PreTrainedTokenizerFast,
        limit: int,
        on_delta: DeltaCallback | None,
    ) -> None:
        """``limit``: most tokens to sample, so that prompt and answer fit the model."""
        self.prompt_len = len(prompt_ids)
        self.ids = list(prompt_ids)
        self.params = params
        self.adapter = adapter
        self.random = RandomNumbers(params.seed)
        self.handle = RequestHandle(Future())
        self.submitted = time.monotonic()
        self.first_token: float | None = None
        self.slot = -1
        self.computed = 0
        self.cached = 0
        self.observed: list[ScoredToken | None] = [None]
        self._sampled: list[SampledToken] = []
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, params.stop)
        self._limit = limit
        self._on_delta = on_delta
        self._shown = 0
        self._finish: FinishReason | None = None
        self._stop_reason: str | int | None = None

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.ids) - self.computed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is complete; ``None`` while it is not."""
        return self._finish

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self._finish is not None

    def append(self, sampled: SampledToken, eos_ids: frozenset[int]) -> None:
        """Take the next sampled token and decide whether the answer ends with it."""
        self.first_token = self.first_token or time.monotonic()
        self.random.keep(1 if self.params.warm else 0)
        self.ids.append(sampled.token)
        self._sampled.append(sampled)
        if sampled.token in eos_ids and not self.params.ignore_eos:
            self._finish = FinishReason.STOP
        elif sampled.token in self.params.stop_token_ids:
            self._finish, self._stop_reason = FinishReason.STOP, sampled.token
        elif self._text.add(sampled.token):
            self._finish, self._stop_reason = FinishReason.STOP, self._text.stopped_by
        elif len(self._sampled) >= self._limit:
            self._finish = FinishReason.LENGTH
        if self._finish is not None:
            whole = self._tokenizer.decode([s.token for s in self._sampled], skip_special_tokens=True)
            self._text.finish(str(whole))
        if self._on_delta is not None:
            self._on_delta(Delta((sampled,), self._text.text[self._shown :]))
            self._shown = len(self._text.text)

    def result(self) -> Generation:
        """The finished answer."""
        assert self._finish is not None
        return Generation(
            prompt_ids=tuple(self.ids[: self.prompt_len]),
            sampled=tuple(self._sampled),
            text=self._text.text,
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
            prompt=None if self.params.prompt_logprobs is None else tuple(self.observed),
            cached_tokens=self.cached,
            adapter=self.adapter.name if self.adapter else None,
        )
