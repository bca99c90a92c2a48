"""Whether a kernel computes the attention of a packed layout, and its gradients: tried before anything is trained.

A compiled kernel depends on the GPU and on the releases of PyTorch and Triton. Wrong gradients would train another
policy without a word; wrong logprobs would be found by ``packing_check``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from openhands_rl_plugin.training.data.layout import lay_out
from openhands_rl_plugin.training.policies.packed_rows import PackedRows

TOLERANCE = 0.05
"""Of a difference, relative to the size of what is expected: bfloat16 and TF32 come to less than 0.01, a kernel that
takes other pairs of rows to more than 0.1."""

_PREFIX, _SUFFIXES, _OTHER = 150, (60, 90), 90
"""Tokens: blocks of 128 rows that are skipped, masked and whole."""

Kernel = Callable[[Tensor, Tensor, Tensor, PackedRows], Tensor]
"""query: [1, heads, N, dim]; key: [1, kv_heads, N, dim]; value: [1, kv_heads, N, own dim]; the layout -> [1, N, heads,
own dim]."""


class Heads(NamedTuple):
    """What a kernel is compiled for. ``own``: the width of a value; ``softcap``: as in ``attention_of``."""

    heads: int
    kv_heads: int
    dim: int
    own: int
    dtype: torch.dtype
    scaling: float
    softcap: float | None = None


def problem_of_kernel(kernel: Kernel, heads: Heads, device: torch.device) -> str:
    """What is wrong with the output and the gradients of ``kernel``, in one clause; empty when they are right.

    They are compared with softmax over the whole matrix of scores in float64. Raises what ``kernel`` raises.
    """
    prefix = tuple(range(_PREFIX))
    sequences = [(*prefix, *(at for _ in range(count))) for at, count in enumerate(_SUFFIXES, start=1000)]
    rows = PackedRows(lay_out([*sequences, tuple(range(2000, 2000 + _OTHER))]), device)
    count, source = len(rows.layout.ids), torch.Generator().manual_seed(0)
    shapes = ((heads.heads, heads.dim), (heads.kv_heads, heads.dim), (heads.kv_heads, heads.own))
    made = [torch.randn(1, number, count, width, generator=source).to(device, heads.dtype) for number, width in shapes]
    outer = torch.randn(1, count, heads.heads, heads.own, generator=source).to(device, heads.dtype)
    found = _with_gradients(lambda query, key, value: kernel(query, key, value, rows), made, outer)
    visible = _visible(rows)
    wide = [each.double() for each in made]
    expected = _with_gradients(
        lambda query, key, value: _plain(query, key, value, visible, heads), wide, outer.double()
    )
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    for name, mine, right in zip(names, found, expected, strict=True):
        difference = ((mine.double() - right).norm() / right.norm()).item()
        if not difference <= TOLERANCE:
            return f"its {name} differs by {difference:.2g} of its size from that of plain products"
    return ""


def _with_gradients(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], outer: Tensor
) -> list[Tensor]:
    query, key, value = (each.detach().requires_grad_() for each in inputs)
    found = attention(query, key, value)
    return [found.detach(), *torch.autograd.grad(found, (query, key, value), outer)]


def _visible(rows: PackedRows) -> Tensor:
    """[N, N] booleans, by the sequences: a token attends to those of its own sequence up to it."""
    found = torch.zeros(len(rows.layout.ids), len(rows.layout.ids), dtype=torch.bool, device=rows.ids.device)
    for own in rows.layout.rows:
        places = torch.tensor(own, device=found.device)
        found[places[:, None], places[None]] |= torch.ones(len(own), len(own), device=found.device).tril().bool()
    return found


def _plain(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, heads: Heads) -> Tensor:
    copies = heads.heads // heads.kv_heads
    scores = query @ key.repeat_interleave(copies, 1).transpose(2, 3) * heads.scaling
    scores = scores if heads.softcap is None else heads.softcap * torch.tanh(scores / heads.softcap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ value.repeat_interleave(copies, 1)).transpose(1, 2)
