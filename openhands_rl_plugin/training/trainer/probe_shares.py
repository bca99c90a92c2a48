"""What a server's samples after a probe's text are compared with: see ``models/adapters/frequency_check.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from openhands_rl_plugin.core.types import ExpectedShare
from openhands_rl_plugin.training.policies.packed_model import PackedModel

_POSITIONS = 4
_LIKELIEST = 100
"""More ids than the ``top_k`` of any published model (20, 40, 50, 64), so that one cuts off all others."""
_FLAT = 2.0
"""The temperature at which the ids behind the likeliest ones have a good share also after confident text."""
_PENALTY = 1.05
"""Qwen2.5's, the smallest ``repetition_penalty`` of a published model; positions where it shows most are chosen."""


@torch.no_grad()
def expected_shares(policy: PackedModel, token_ids: Sequence[int]) -> tuple[ExpectedShare, ...]:
    """The positions of a probe at which settings of a server's own show most. Empty for sharded weights."""
    if policy.sharded:
        return ()
    likeliest: list[tuple[float, ExpectedShare]] = []
    repeated: list[tuple[float, ExpectedShare]] = []
    position = 0
    for logits in policy.next_token_logits(tuple(token_ids)):
        for row in logits:
            position += 1
            likeliest.extend(_likeliest(row, position))
            repeated.extend(_repeated(row, token_ids[:position], position))
    chosen = (sorted(each, key=lambda one: -one[0])[:_POSITIONS] for each in (likeliest, repeated))
    return tuple(share for each in chosen for _, share in each)


def _likeliest(logits: Tensor, position: int) -> list[tuple[float, ExpectedShare]]:
    if len(logits) <= _LIKELIEST:
        return []
    values, ids = torch.softmax(logits / _FLAT, -1).topk(_LIKELIEST)
    share = values.sum().item()
    return _possible("likeliest", position, _FLAT, ids.tolist(), share, 1 - share)


def _repeated(logits: Tensor, context: Sequence[int], position: int) -> list[tuple[float, ExpectedShare]]:
    ids = sorted(set(context))
    own = logits[ids]
    rest = logits.clone()
    rest[ids] = -math.inf
    others = rest.logsumexp(-1)
    share, penalised = (
        torch.sigmoid(values.logsumexp(-1) - others).item()
        for values in (own, torch.where(own > 0, own / _PENALTY, own * _PENALTY))
    )
    # How far apart the two are, in standard deviations of a share.
    shown = abs(share - penalised) / math.sqrt(max(share * (1 - share), 1e-9))
    return _possible("repeated", position, 1.0, ids, share, shown)


def _possible(
    kind: str, position: int, temperature: float, ids: list[int], share: float, shown: float
) -> list[tuple[float, ExpectedShare]]:
    """The share with how much it shows; none where it is 0 or 1, which no sample can differ from by chance."""
    if not 1e-3 < share < 1 - 1e-3:
        return []
    values = {"kind": kind, "position": position, "temperature": temperature, "token_ids": ids, "share": share}
    return [(shown, ExpectedShare.model_validate(values))]
