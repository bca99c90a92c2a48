"""Check by what a server samples that it samples from the policy, and not with settings of its own.

A server's logprobs are those of the model, whatever it samples with. So a hidden ``top_k`` or ``repetition_penalty``
(from the model's ``generation_config.json``, from a proxy that drops fields it does not know) is seen in frequencies
only. Two are compared with the trainer's distribution, on single tokens after fixed texts. The likeliest ids, at a
temperature that flattens the distribution, have less than all of it: a ``top_k``, ``top_p`` or ``min_p`` gives them
all. The ids that are in the text already get less with a repetition penalty above 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.types import ExpectedShare

SAMPLES = {"likeliest": 16, "repeated": 256}
"""Tokens sampled at each position. With four positions of either kind a publication costs 1,088 tokens, and a
repetition penalty is found that lowers the log-odds of the repeated ids by half a nat at even odds: one of 1.05 does so
where their logits are 10 or more."""

_FALSE_ALARM = 1e-6
"""Bound of the probability that a server with the trainer's distribution is refused, for either kind and side."""

_CAUSES = {
    "likeliest": "a top_k, top_p or min_p",
    "repeated": "a repetition_penalty",
}


def check_sampled_shares(
    name: str, shares: Sequence[ExpectedShare], sampled: Sequence[Sequence[int]], margin: float
) -> None:
    """Raise ``PublishError`` when the ids in ``sampled`` are not a sample of the trainer's distributions.

    ``sampled``: the ids drawn for each of ``shares``. ``margin``: by how much, in nats of log-odds, two sound
    implementations may differ.
    """
    for kind, cause in _CAUSES.items():
        own = [(each, ids) for each, ids in zip(shares, sampled, strict=True) if each.kind == kind and ids]
        count = sum(len(ids) for _, ids in own)
        if not count:
            continue
        seen = sum(token in each.token_ids for each, ids in own for token in ids) / count
        expected = sum(each.share * len(ids) for each, ids in own) / count
        low, high = (sum(_shifted(each.share, by) * len(ids) for each, ids in own) / count for by in (-margin, margin))
        if _is_outside(seen, low, high, count):
            raise PublishError(
                f"{name} was refused: {seen:.0%} of {count} tokens that the server sampled are among the {kind} ones, "
                f"and {expected:.0%} should be; it samples with {cause} of its own, so training would be off policy. "
                "Start vLLM with --generation-config vllm (SGLang: --sampling-defaults openai), and see that no proxy "
                "drops parameters; the version in use stays"
            )


def _is_outside(seen: float, low: float, high: float, count: int) -> bool:
    """Chernoff's bound for a sum of independent trials with unequal probabilities (Hoeffding 1963, theorem 1): the
    chance of a share of at least ``seen`` above the mean is at most exp(-count KL(seen || mean)); below, the same."""
    nearest = min(max(seen, low), high)
    return count * _divergence(seen, nearest) > -math.log(_FALSE_ALARM)


def _divergence(some: float, other: float) -> float:
    """KL divergence of two coins, in nats."""
    parts = ((some, other), (1 - some, 1 - other))
    return sum(p * math.log(p / q) for p, q in parts if p > 0)


def _shifted(share: float, by: float) -> float:
    """The share with log-odds moved ``by``."""
    return 1 / (1 + (1 - share) / share * math.exp(-by))
