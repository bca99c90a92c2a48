"""One request inside the generator: its handle, its state, its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from openhands_rl_plugin.models.generator.model import LoadedAdapter

# Size of the first ``topk`` for top-p and top-k, since one of the whole vocabulary is slow: 256 candidates hold the
# nucleus of nearly every step, 16 times as many that of most others; the rest needs the whole vocabulary.
_CANDIDATES = 256
# Below it, temperature is 0 (as in vLLM): divided by less, logits leave the range of float32.
_COLDEST = 1e-5


@dataclass(frozen=True)
class DecodingParams:
    """The resolved sampling parameters of one sequence: ``core.types.SamplingParams`` with every default filled in.

    ``temperature`` 0 is greedy. ``top_k`` 0 or less is off. ``min_p``: the least probability of a token that is
    sampled, as a share of the likeliest one's; 0 is off. ``top_logprobs``: how many alternatives to report per token,
    None for none. ``seed`` fixes the sequence whatever else is in the batch (up to floating-point ties). ``stop``:
    texts that end the answer and are cut from it. ``prompt_logprobs``: alternatives to report per prompt token,
    ``None`` for none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def warm(self) -> bool:
        """Whether anything is drawn at random."""
        return self.temperature >= _COLDEST

    @property
    def restricted(self) -> bool:
        """Whether some tokens are excluded from sampling."""
        return self.warm and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def with_seed(self, seed: int | None) -> DecodingParams:
        """The same parameters with another seed."""
        return replace(self, seed=seed)


TopTokens = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SampledToken:
    """One chosen token. ``logprob`` and ``top`` (most likely first) are of the model's own distribution."""

    token: int
    logprob: float
    top: TopTokens


@dataclass(frozen=True)
class ScoredToken:
    """A prompt token's logprob under the model; ``rank`` 1 is the most likely token."""

    token: int
    logprob: float
    rank: int
    top: TopTokens


def random_numbers(seed: int | None) -> torch.Generator:
    """Those of one sequence: the same with the same seed; ``None``: a seed from the system's entropy."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed % 2**63)
    return generator


def sample(logits: Tensor, params: Sequence[DecodingParams], random: Sequence[torch.Generator]) -> list[SampledToken]:
    """logits: float32 [rows, vocabulary], one row per element of ``params``.

    The reported logprobs are ``log_softmax(logits)``: temperature 1, before top_p and top_k, whatever was sampled
    with (vLLM's default, ``raw_logprobs``). One uniform number is drawn per sampled token, none for a greedy one.
    """
    normaliser = logits.logsumexp(-1)
    chosen = logits.argmax(-1)
    warm = [i for i, p in enumerate(params) if p.warm]
    if warm:
        uniform = torch.cat([torch.rand(1, generator=random[i]) for i in warm]).to(logits.device)
        temperature = torch.tensor([params[i].temperature for i in warm], device=logits.device)
        scaled = (logits if len(warm) == len(params) else logits[warm]) / temperature[:, None]
        picked = _draw(scaled, uniform)
        restricted = [j for j, i in enumerate(warm) if params[i].restricted]
        if restricted:
            picked[restricted] = _draw_restricted(
                scaled[restricted], [params[warm[j]] for j in restricted], uniform[restricted]
            )
        chosen[warm] = picked
    logprobs = (logits.gather(-1, chosen[:, None])[:, 0] - normaliser).tolist()
    tops = _tops(logits, normaliser, [p.top_logprobs for p in params])
    return [SampledToken(*row) for row in zip(chosen.tolist(), logprobs, tops, strict=True)]


def score_tokens(logits: Tensor, tokens: Sequence[int], count: int) -> list[ScoredToken]:
    """logits: float32 [rows, vocabulary]; the logprob and rank of each row's token, with ``count`` alternatives."""
    normaliser = logits.logsumexp(-1)
    given = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = ((logits > given).sum(-1) + 1).tolist()
    logprobs = (given[:, 0] - normaliser).tolist()
    tops = _tops(logits, normaliser, [count] * len(tokens))
    return [ScoredToken(*row) for row in zip(tokens, logprobs, ranks, tops, strict=True)]


def _draw(scaled: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the cumulative distribution at ``uniform`` [rows], for logits ``scaled`` [rows, vocabulary]."""
    cumulative = torch.softmax(scaled, -1).cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=scaled.shape[-1] - 1)


def _draw_restricted(scaled: Tensor, params: Sequence[DecodingParams], uniform: Tensor) -> Tensor:
    """``_draw`` among the tokens that min_p, top_k and top_p leave, in vLLM's order; looks at few candidates first.

    min_p: Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling", after the temperature.
    """
    vocabulary = scaled.shape[-1]
    most = [min(p.top_k, vocabulary) if p.top_k > 0 else vocabulary for p in params]
    top_k = torch.tensor(most, device=scaled.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=scaled.device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=scaled.device)[:, None]
    normaliser = scaled.logsumexp(-1, keepdim=True)
    width = _CANDIDATES
    while True:
        width = min(width, vocabulary)
        values, tokens = scaled.topk(width, -1)
        probabilities = (values - normaliser).exp()
        least = min_p * probabilities[:, :1]
        inside = (torch.arange(width, device=scaled.device) < top_k) & (probabilities >= least)
        # top_p is a share of what the others left; that share's whole is known once all of it is a candidate.
        bounded = (top_k <= width) | (probabilities[:, -1:] < least)
        whole = torch.where(bounded, (probabilities * inside).sum(-1, keepdim=True), 1.0)
        cumulative = probabilities.cumsum(-1)
        enough = bounded | ((top_k == vocabulary) & (least == 0) & (cumulative[:, -1:] >= top_p))
        if width == vocabulary or enough.all():
            break
        width *= 16
    keep = inside & (cumulative - probabilities < top_p * whole)
    keep[:, 0] = True
    kept = (probabilities * keep).cumsum(-1)
    index = torch.searchsorted(kept, uniform[:, None] * kept[:, -1:], right=True)
    return tokens.gather(-1, torch.minimum(index, keep.sum(-1, keepdim=True) - 1))[:, 0]


def _tops(logits: Tensor, normaliser: Tensor, counts: Sequence[int | None]) -> list[TopTokens]:
    rows = [i for i, count in enumerate(counts) if count]
    tops: list[TopTokens] = [()] * len(counts)
    if rows:
        widest = min(max(counts[i] or 0 for i in rows), logits.shape[-1])
        values, tokens = logits[rows].topk(widest, -1)
        logprobs = (values - normaliser[rows][:, None]).tolist()
        for i, row_tokens, row_logprobs in zip(rows, tokens.tolist(), logprobs, strict=True):
            tops[i] = tuple(zip(row_tokens, row_logprobs, strict=True))[: counts[i]]
    return tops


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
        begun = (n for stop in self._stop for n in range(1, len(stop)) if self._whole.endswith(stop[:n]))
        return max(begun, default=0)


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
    cancelled: bool = False

    def __post_init__(self) -> None:
        # The scheduler sets the result; a caller that stops waiting must not cancel the future under it.
        self.future.set_running_or_notify_cancel()

    def cancel(self) -> None:
        """Stop at the next step; ``future`` then raises ``RequestCancelled``. No effect when finished."""
        self.cancelled = True


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
        self.random = random_numbers(params.seed)
        self.handle = RequestHandle(Future())
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
        self.finish_reason: FinishReason | None = None
        """Why the answer is complete; ``None`` while it is not."""
        self._stop_reason: str | int | None = None

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.ids) - self.computed

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def append(self, sampled: SampledToken, eos_ids: frozenset[int]) -> None:
        """Take the next sampled token and decide whether the answer ends with it."""
        self.ids.append(sampled.token)
        self._sampled.append(sampled)
        if sampled.token in eos_ids and not self.params.ignore_eos:
            self.finish_reason = FinishReason.STOP
        elif sampled.token in self.params.stop_token_ids:
            self.finish_reason, self._stop_reason = FinishReason.STOP, sampled.token
        elif self._text.add(sampled.token):
            self.finish_reason, self._stop_reason = FinishReason.STOP, self._text.stopped_by
        elif len(self._sampled) >= self._limit:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            whole = self._tokenizer.decode([s.token for s in self._sampled], skip_special_tokens=True)
            self._text.finish(str(whole))
        if self._on_delta is not None:
            self._on_delta(Delta((sampled,), self._text.text[self._shown :]))
            self._shown = len(self._text.text)

    def result(self) -> Generation:
        """The finished answer."""
        assert self.finish_reason is not None
        return Generation(
            prompt_ids=tuple(self.ids[: self.prompt_len]),
            sampled=tuple(self._sampled),
            text=self._text.text,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            prompt=None if self.params.prompt_logprobs is None else tuple(self.observed),
            cached_tokens=self.cached,
            adapter=self.adapter.name if self.adapter else None,
        )
