"""Layouts of random trees of sequences, and what attention over them has to come to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from openhands_rl_plugin.training.data.layout import Layout, lay_out
from openhands_rl_plugin.training.policies.attention_in_blocks import attention_in_blocks
from openhands_rl_plugin.training.policies.packed_rows import PackedRows


@dataclass(frozen=True)
class Heads:
    """Numbers and widths. ``own``: of a value."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    own: int = 16


def tree_of(seed: int, leaves: int, longest: int) -> Layout:
    """``leaves`` sequences of up to ``longest`` tokens each; all but the first begin as one of the others does."""
    source = random.Random(seed)
    made: list[tuple[int, ...]] = []
    for _ in range(leaves):
        shared = source.choice(made) if made else ()
        begin = shared[: source.randrange(len(shared) + 1)]
        fresh = source.randrange(1, max(2, longest - len(begin)))
        made.append((*begin, *(source.randrange(1000) for _ in range(fresh))))
    return lay_out(made)


TREES = st.builds(tree_of, st.integers(0, 10**6), st.integers(1, 7), st.integers(2, 400))
WINDOWS = st.one_of(st.none(), st.integers(1, 300))


def attends(layout: Layout, window: int | None) -> Tensor:
    """[N, N] booleans, by the sequences themselves: row i attends to the tokens of its own sequence up to it."""
    found = torch.zeros(len(layout.ids), len(layout.ids), dtype=torch.bool)
    for rows in layout.rows:
        for at, row in enumerate(rows):
            first = 0 if window is None else max(0, at - window + 1)
            found[row, list(rows[first : at + 1])] = True
    return found


def inputs_of(layout: Layout, heads: Heads, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    """Queries, keys and values, as a layer makes them; the same numbers for all devices."""
    torch.manual_seed(seed)
    count = len(layout.ids)
    shapes = ((heads.heads, heads.dim), (heads.kv_heads, heads.dim), (heads.kv_heads, heads.own))
    made = (torch.randn(1, count, number, width).to(dtype) for number, width in shapes)
    return [each.to(device).transpose(1, 2).requires_grad_() for each in made]


def with_gradients(attention: Callable[[], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of the inputs, float32 on the CPU, for one random gradient of the output."""
    found = attention()
    torch.manual_seed(1)
    outer = torch.randn(found.shape).to(found)
    return [each.detach().float().cpu() for each in (found, *torch.autograd.grad(found, inputs, outer))]


def exact(layout: Layout, inputs: list[Tensor], scaling: float, window: int | None) -> list[Tensor]:
    """The processor's path in float64 arithmetic but for its scores, with gradients."""
    wide = [each.detach().cpu().double().requires_grad_() for each in inputs]
    rows = PackedRows(layout, torch.device("cpu"))
    return with_gradients(lambda: attention_in_blocks(*wide, rows, scaling, window), wide)


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the size of what is expected, in the Euclidean norm."""
    return ((found - expected).norm() / expected.norm().clamp_min(1e-12)).item()
