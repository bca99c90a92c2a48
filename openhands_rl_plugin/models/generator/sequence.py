"""One request inside the generation core: its parameters, its state, its result."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

from transformers import PreTrainedTokenizerFast

from openhands_rl_plugin.models.generator.lora import Adapter
from openhands_rl_plugin.models.generator.sampling import Observed, Sampled, SamplingParams, new_random
from openhands_rl_plugin.models.generator.text import AnswerText


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    `token_ids` are exactly the sampled ids, the end-of-sequence token included; `sampled[i]` gives the logprob of
    `token_ids[i]` under the model's own distribution (temperature 1, nothing excluded). `text` has special tokens and
    stop strings removed. `prompt`: per prompt token where it stood, None for the first; only when asked for.
    `cached_tokens`: prompt tokens whose keys and values were re-used. `adapter`: the version sampled from.
    """

    prompt_ids: tuple[int, ...]
    sampled: tuple[Sampled, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt: tuple[Observed | None, ...] | None
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
    """New tokens of an answer under way and the text that may now be shown."""

    sampled: tuple[Sampled, ...]
    text: str


DeltaSink = Callable[[Delta], None]


@dataclass(eq=False)
class Ticket:
    """A submitted request: wait for `future`, or give up with `cancel()`."""

    future: "Future[Generation]"
    _cancelled: list[bool] = field(default_factory=lambda: [False])

    def __post_init__(self) -> None:
        # The scheduler settles the future; somebody who stops waiting for it must not cancel it under the scheduler.
        self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        """Stop generating soon and free the slot; `future` then raises `RequestCancelled`. No effect when finished."""
        self._cancelled[0] = True

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled[0]


class SequenceState:
    """A request's state in the scheduler thread."""

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        adapter: Adapter | None,
        tokenizer: PreTrainedTokenizerFast,
        limit: int,
        on_delta: DeltaSink | None,
    ) -> None:
        """`limit`: most tokens to sample, so that prompt and answer fit the model."""
        self.prompt_len = len(prompt_ids)
        self.ids = list(prompt_ids)
        self.params = params
        self.adapter = adapter
        self.random = new_random(params.seed)
        self.ticket = Ticket(Future())
        self.slot = -1
        self.computed = 0
        self.cached = 0
        self.observed: list[Observed | None] = [None]
        self._sampled: list[Sampled] = []
        self._tokenizer = tokenizer
        self._text = AnswerText(tokenizer, params.stop)
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
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self._finish is not None

    def append(self, sampled: Sampled, eos_ids: frozenset[int]) -> None:
        """Take the next sampled token and decide whether the answer ends with it."""
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
