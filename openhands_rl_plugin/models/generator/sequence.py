"""One request inside the generator: its parameters, its state, and how its tokens are drawn."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

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
    texts that end the answer and are cut from it. ``max_tokens`` ``None``: all that fits. ``prompt_logprobs``:
    alternatives to report per prompt token, ``None`` for none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None

    def seeds(self, n: int) -> list[DecodingParams]:
        """Parameters of ``n`` completions of one prompt: with a seed, completion i has seed + i (as in vLLM)."""
        return [self if self.seed is None else replace(self, seed=self.seed + at) for at in range(n)]


@dataclass(frozen=True)
class ScoredToken:
    """A token with its logprob in the model's own distribution; ``top``: the likeliest tokens there, likeliest first.

    ``rank`` of a prompt token: 1 is the likeliest. It is 0 for a sampled token.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


def random_numbers(seed: int | None) -> torch.Generator:
    """A random generator for one sequence; ``None``: a seed from the system's entropy."""
    return torch.Generator().manual_seed((secrets.randbits(63) if seed is None else seed) % 2**63)


def sample(logits: Tensor, params: Sequence[DecodingParams], random: Sequence[torch.Generator]) -> list[ScoredToken]:
    """logits: float32 [rows, vocabulary], one row per element of ``params``.

    The reported logprobs are ``log_softmax(logits)``: temperature 1, before top_p and top_k, whatever was sampled
    with (vLLM's default, ``raw_logprobs``). One uniform number is drawn per sampled token, none for a greedy one.
    """
    chosen = logits.argmax(-1)
    warm = [i for i, p in enumerate(params) if p.temperature >= _COLDEST]
    if warm:
        uniform = torch.cat([torch.rand(1, generator=random[i]) for i in warm]).to(logits.device)
        temperature = torch.tensor([params[i].temperature for i in warm], device=logits.device)
        scaled = (logits if len(warm) == len(params) else logits[warm]) / temperature[:, None]
        picked = _draw(torch.softmax(scaled, -1), uniform)
        some = [j for j, i in enumerate(warm) if params[i].top_p < 1 or params[i].top_k > 0 or params[i].min_p > 0]
        if some:
            picked[some] = _draw_restricted(scaled[some], [params[warm[j]] for j in some], uniform[some])
        chosen[warm] = picked
    return _scored(logits, chosen, [p.top_logprobs for p in params])


def score_tokens(logits: Tensor, tokens: Sequence[int], count: int) -> list[ScoredToken]:
    """logits: float32 [rows, vocabulary]; the logprob and rank of each row's token, with ``count`` alternatives."""
    given = torch.tensor(tokens, device=logits.device)
    ranks = ((logits > logits.gather(-1, given[:, None])).sum(-1) + 1).tolist()
    scored = _scored(logits, given, [count] * len(ranks))
    return [replace(one, rank=rank) for one, rank in zip(scored, ranks, strict=True)]


def _scored(logits: Tensor, tokens: Tensor, counts: Sequence[int | None]) -> list[ScoredToken]:
    normaliser = logits.logsumexp(-1)
    logprobs = (logits.gather(-1, tokens[:, None])[:, 0] - normaliser).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
    if rows := [i for i, count in enumerate(counts) if count]:
        values, others = logits[rows].topk(min(max(counts[i] or 0 for i in rows), logits.shape[-1]), -1)
        found = zip(others.tolist(), (values - normaliser[rows][:, None]).tolist(), strict=True)
        for i, (ids, scores) in zip(rows, found, strict=True):
            tops[i] = tuple(zip(ids, scores, strict=True))[: counts[i]]
    return [ScoredToken(*row) for row in zip(tokens.tolist(), logprobs, tops, strict=True)]


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the running sum of ``weights`` [rows, tokens] passes ``uniform`` [rows] of the whole."""
    cumulative = weights.cumsum(-1)
    index = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return index.clamp_(max=weights.shape[-1] - 1)


def _draw_restricted(scaled: Tensor, params: Sequence[DecodingParams], uniform: Tensor) -> Tensor:
    """Draw among the tokens that min_p, top_k and top_p leave, in vLLM's order; looks at few candidates first.

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
    index = torch.minimum(_draw(probabilities * keep, uniform), keep.sum(-1) - 1)
    return tokens.gather(-1, index[:, None])[:, 0]


DeltaCallback = Callable[[ScoredToken, str], None]
"""Takes a new token, and the text that can be shown with it."""


@dataclass(eq=False)
class Generation:
    """One request and its answer, which is complete when ``finish_reason`` is set.

    ``sampled``: exactly the sampled tokens, the end of the sequence included. ``text``: what may be shown of them,
    without special tokens and stop strings; an end that might grow into a stop string is withheld until then.
    ``prompt``: the prompt tokens' logprobs, ``None`` for the first token; only with ``prompt_logprobs``.
    ``cached_tokens``: prompt tokens whose keys and values were re-used. ``adapter``: the version sampled from.
    ``computed``: tokens whose keys and values are in ``slot``.
    """

    prompt_ids: tuple[int, ...]
    params: DecodingParams
    tokenizer: PreTrainedTokenizerFast = field(repr=False)
    adapter: LoadedAdapter | None = None
    on_delta: DeltaCallback | None = None
    sampled: list[ScoredToken] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    prompt: list[ScoredToken | None] | None = None
    cached_tokens: int = 0
    computed: int = 0
    slot: int = -1

    def __post_init__(self) -> None:
        self.ids = list(self.prompt_ids)
        self.future: Future[Generation] = Future()
        self.random = random_numbers(self.params.seed)
        if self.params.prompt_logprobs is not None:
            self.prompt = [None]
        self._stream = DecodeStream(skip_special_tokens=True)
        self._whole = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The sampled ids."""
        return tuple(s.token for s in self.sampled)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The sampled ids' logprobs."""
        return tuple(s.logprob for s in self.sampled)

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.ids) - self.computed

    def append(self, token: ScoredToken, eos_ids: frozenset[int]) -> None:
        """Take the next sampled token and decide whether the answer ends with it."""
        self.ids.append(token.token)
        self.sampled.append(token)
        shown, stop = len(self.text), None
        if token.token in eos_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif token.token in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token.token
        elif (stop := self._read(token.token)) is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif len(self.sampled) >= (self.params.max_tokens or math.inf):
            self.finish_reason = "length"
        if self.finish_reason is not None and stop is None:  # with characters that are not complete
            self.text = str(self.tokenizer.decode(list(self.token_ids), skip_special_tokens=True))
        if self.on_delta is not None:
            self.on_delta(token, self.text[shown:])

    def _read(self, token: int) -> str | None:
        """Add the text of one more token; the stop string that is complete with it, if any."""
        piece = self._stream.step(self.tokenizer.backend_tokenizer, token)
        if not piece:
            return None
        searched = max(0, len(self._whole) - max(map(len, self.params.stop), default=0))
        self._whole += piece
        begun = (n for stop in self.params.stop for n in range(1, len(stop)) if self._whole.endswith(stop[:n]))
        found = [(at, stop) for stop in self.params.stop if (at := self._whole.find(stop, searched)) >= 0]
        end, stop = min(found, default=(len(self._whole) - max(begun, default=0), None))
        self.text = self._whole[:end]
        return stop
