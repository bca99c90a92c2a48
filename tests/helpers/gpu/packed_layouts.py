"""Layouts of random trees of sequences, and what attention over them has to come to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from openhands_rl_plugin.training.data.packing import Layout, lay_out


@dataclass(frozen=True)
class Heads:
    """Numbers and widths. ``own``: of a value."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    own: int = 16

    @property
    def scale(self) -> float:
        """Of the scores, as in models."""
        return self.dim**-0.5


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


def plain(
    layout: Layout, inputs: list[Tensor], scaling: float, window: int | None, softcap: float | None = None
) -> Tensor:
    """Softmax over the whole matrix of scores, on the device of the inputs."""
    query, key, value = inputs
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    hidden = ~attends(layout, window).to(query.device)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2)


def exact(
    layout: Layout, inputs: list[Tensor], scaling: float, window: int | None, softcap: float | None = None
) -> list[Tensor]:
    """Output and gradients in float64, computed where the inputs are."""
    wide = [each.detach().double().requires_grad_() for each in inputs]
    return with_gradients(lambda: plain(layout, wide, scaling, window, softcap), wide)


def difference(found: Tensor, expected: Tensor, least: float = 1e-12) -> float:
    """Relative to the size of what is expected, or to ``least`` if that is more, in the Euclidean norm."""
    return ((found - expected).norm() / expected.norm().clamp_min(least)).item()


SMALLEST = 0.2
"""Of the gradient that comes in: smaller ones are compared as if they were so large.

Gradients of scores cancel out: of a row that sees itself alone they are exactly zero, and what a kernel has of them is
the rounding of what cancels.
"""

BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 5e-3}
"""Of ``difference``, on a GPU, where float32 is multiplied by TF32. Twice the rounding of the factors of its products
(``rounded_attention``)."""


def wrong(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> str:
    """Which of the output and the gradients of queries, keys and values is beyond its bound; empty if none is."""
    incoming = SMALLEST * expected[0].numel() ** 0.5  # ``with_gradients``: random numbers of variance 1
    each = [difference(*pair, incoming) for pair in zip(found, expected, strict=True)]
    names = ("output", "query", "key", "value")
    return ", ".join(f"{name}: {size:.2g}" for name, size in zip(names, each, strict=True) if not size < BOUNDS[dtype])
