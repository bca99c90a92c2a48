"""Which rows of a packed layout attend to which, by blocks: what FlexAttention's kernels skip, or need not mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openhands_rl_plugin.training.policies.packed_rows import PackedRows

BLOCK = 128
"""Rows of a block."""

FEWEST_BLOCKS = 2
"""A dimension of size 1 would be compiled by itself."""


class VisibleBlocks(NamedTuple):
    """Rows padded to whole blocks, [R]; row ``i`` attends to row ``j`` if ``j <= i < ends[j]`` and ``positions[j] >
    befores[i]``.

    ``befores``: the position of the last token that a sliding window hides from a row, -1 where it hides none. The
    others are int32 in FlexAttention's form, for keys by queries and queries by keys: the numbers ([1, 1, R / BLOCK])
    and places ([1, 1, R / BLOCK, R / BLOCK]) of blocks with a mask, and of blocks in which all pairs attend.
    """

    ends: Tensor
    positions: Tensor
    befores: Tensor
    keys: Tensor
    key_places: Tensor
    full_keys: Tensor
    full_key_places: Tensor
    queries: Tensor
    query_places: Tensor
    full_queries: Tensor
    full_query_places: Tensor

    @property
    def rows(self) -> int:
        """The number of rows with the padding."""
        return len(self.ends)


def visible_blocks(rows: PackedRows, window: int | None) -> VisibleBlocks:
    """Made once for all layers of a pass that have the same ``window`` (in tokens, ``None`` for none)."""
    return rows.once(("visible_blocks", window), lambda: _visible_blocks(rows, window))


def _visible_blocks(rows: PackedRows, window: int | None) -> VisibleBlocks:
    runs, device = rows.layout.runs, rows.ids.device
    count = len(rows.layout.ids)
    padded = max(FEWEST_BLOCKS, -(-count // BLOCK)) * BLOCK
    # Rows of padding are a sequence of their own, so that every row attends to one at least.
    lengths = torch.tensor([*(run.stop - run.start for run in runs), padded - count], device=device)
    ends = torch.tensor([*(run.end for run in runs), padded], dtype=torch.int32, device=device)
    ends = ends.repeat_interleave(lengths, output_size=padded)
    filler = torch.arange(padded - count, dtype=torch.int32, device=device)
    positions = torch.cat([rows.positions[0].to(torch.int32), filler])
    befores = torch.full_like(positions, -1) if window is None else (positions - window).clamp_min_(-1)
    some, every = _by_block(ends, positions, befores)
    masked = some & ~every
    return VisibleBlocks(
        ends, positions, befores, *_listed(masked), *_listed(every), *_listed(masked.t()), *_listed(every.t())
    )


def _by_block(ends: Tensor, positions: Tensor, befores: Tensor) -> tuple[Tensor, Tensor]:
    """[queries, keys] booleans by block: whether some pairs of rows may attend, and whether all pairs do.

    A block of which only that may be said is masked pair by pair, so the first may be true of too many.
    """
    least = [each.view(-1, BLOCK).amin(1) for each in (ends, positions, befores)]
    most = [each.view(-1, BLOCK).amax(1) for each in (ends, positions, befores)]
    first = torch.arange(0, len(ends), BLOCK, device=ends.device)
    earlier = first[None] < first[:, None]
    some = earlier & (first[:, None] < most[0][None]) & (most[1][None] > least[2][:, None])
    some |= torch.eye(len(first), dtype=torch.bool, device=ends.device)
    every = earlier & (first[:, None] + BLOCK <= least[0][None]) & (least[1][None] > most[2][:, None])
    return some, every


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of true entries of each row, and their places in front of the others."""
    numbers = blocks.sum(1, dtype=torch.int32)
    places = torch.argsort(blocks.to(torch.int32), dim=1, descending=True, stable=True).to(torch.int32)
    return numbers[None, None], places[None, None].contiguous()
