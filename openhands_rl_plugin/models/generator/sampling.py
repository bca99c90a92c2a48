"""Choose the next token of every row of a batch, each with its own parameters and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Sizes of the first two ``topk`` calls for top-p and top-k, since a top-k of the whole vocabulary is slow:
# 256 candidates hold the nucleus of nearly every step, 4096 of most others; the rest needs the whole vocabulary.
_CANDIDATES = (256, 4096)
# Below it, temperature is 0 (as in vLLM): divided by less, logits leave the range of float32.
_COLDEST = 1e-5


@dataclass(frozen=True)
class DecodingParams:
    """The resolved sampling parameters of one sequence: ``core.types.SamplingParams`` with every default filled in.

    ``temperature`` 0 is greedy. ``top_k`` 0 is off. ``min_p``: the least probability of a token that is sampled, as a
    share of the likeliest one's; 0 is off. ``top_logprobs``: how many alternatives to report per token, None
    for none. ``seed`` fixes the sequence whatever else is in the batch (up to floating-point ties). ``stop``: texts
    that end the answer and are cut from it. ``prompt_logprobs``: alternatives to report per prompt token, ``None`` for
    none.
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


class RandomNumbers:
    """The uniform numbers of one sequence, which are the same with the same seed however many are drawn at once.

    Those that were drawn for tokens which are not taken come again: ``keep``. Not thread-safe.
    """

    def __init__(self, seed: int | None) -> None:
        """``seed``: ``None`` for one from the system's entropy."""
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed % 2**63)
        self._drawn: list[Tensor] = []
        self._next = 0

    def draw(self) -> Tensor:
        """The next number, in [0, 1): [1]."""
        if self._next == len(self._drawn):
            self._drawn.append(torch.rand(1, generator=self._generator))
        self._next += 1
        return self._drawn[self._next - 1]

    def keep(self, count: int) -> None:
        """Of the numbers that were drawn since the last call the first ``count`` are used; the others come again."""
        del self._drawn[:count]
        self._next = 0


def sample(logits: Tensor, params: Sequence[DecodingParams], random: Sequence[RandomNumbers]) -> list[SampledToken]:
    """logits: float32 [rows, vocabulary], one row per element of ``params``.

    The reported logprobs are ``log_softmax(logits)``: temperature 1, before top_p and top_k, whatever was sampled
    with (vLLM's default, ``raw_logprobs``). One uniform number is drawn per sampled token, none for a greedy one.
    """
    normaliser = logits.logsumexp(-1)
    chosen = logits.argmax(-1)
    warm = [i for i, p in enumerate(params) if p.warm]
    if warm:
        uniform = torch.cat([random[i].draw() for i in warm]).to(logits.device)
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
    top_k = torch.tensor([min(p.top_k or vocabulary, vocabulary) for p in params], device=scaled.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=scaled.device)[:, None]
    min_p = torch.tensor([p.min_p for p in params], device=scaled.device)[:, None]
    normaliser = scaled.logsumexp(-1, keepdim=True)
    drawn = torch.empty(len(params), dtype=torch.long, device=scaled.device)
    rows = torch.arange(len(params), device=scaled.device)
    for width in (*(w for w in _CANDIDATES if w < vocabulary), vocabulary):
        values, tokens = scaled[rows].topk(width, -1)
        probabilities = (values - normaliser[rows]).exp()
        k, share = top_k[rows], top_p[rows]
        least = min_p[rows] * probabilities[:, :1]
        inside = (torch.arange(width, device=scaled.device) < k) & (probabilities >= least)
        # top_p is a share of what the others left; that share's whole is known once all of it is a candidate.
        bounded = (k <= width) | (probabilities[:, -1:] < least)
        whole = torch.where(bounded, (probabilities * inside).sum(-1, keepdim=True), 1.0)
        cumulative = probabilities.cumsum(-1)
        keep = inside & (cumulative - probabilities < share * whole)
        keep[:, 0] = True
        kept = (probabilities * keep).cumsum(-1)
        index = torch.searchsorted(kept, uniform[rows, None] * kept[:, -1:], right=True)
        index = torch.minimum(index, keep.sum(-1, keepdim=True) - 1)
        drawn[rows] = tokens.gather(-1, index)[:, 0]
        enough = bounded | ((k == vocabulary) & (least == 0) & (cumulative[:, -1:] >= share))
        rows = rows[~enough[:, 0]]
        if not len(rows):
            break
    return drawn


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
