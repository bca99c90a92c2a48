"""Attention over slots: decoding rows in batches of neighbouring slots, prompt chunks one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from openhands_rl_plugin.models.generator.kv_cache import KVCache
from openhands_rl_plugin.models.generator.lora import LoadedAdapter

ATTENTION_NAME = "openhands_rl_slots"

# A kernel call costs as much as attending to about this many tokens (measured on 2 cores: 90 us per call, 0.11 us per
# token and row), so rows are batched while their padding costs less.
CALL_COST_TOKENS = 400


@dataclass(frozen=True)
class StepRow:
    """The new tokens ``ids`` of one sequence in this step, at positions ``start ..`` of ``slot``, under ``adapter``.

    ``wanted``: ascending indices into ``ids`` whose next-token logits are returned.
    """

    slot: int
    start: int
    ids: Sequence[int]
    adapter: LoadedAdapter | None
    wanted: Sequence[int]

    @property
    def count(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class _Group:
    """Decoding rows ``first:last`` (in slot order) that lie in neighbouring slots starting at ``slot``."""

    first: int
    last: int
    slot: int
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)


@dataclass
class StepPlan:
    """The slot and position of each token of one flat step. Rows with one token come first, then the longer ones."""

    store: KVCache
    rows: Sequence[StepRow]
    groups: tuple[_Group, ...] = field(init=False)
    chunks: tuple[tuple[int, StepRow], ...] = field(init=False)
    decoding: int = field(init=False)
    order: Tensor | None = field(init=False)
    inverse: Tensor | None = field(init=False)
    slots: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    _masks: dict[tuple[int, int, int | None], Tensor | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        device = self.store.device
        single = [row for row in self.rows if row.count == 1]
        self.decoding = len(single)
        by_slot = sorted(range(len(single)), key=lambda i: single[i].slot)
        self.order = self.inverse = None
        if by_slot != list(range(len(single))):
            self.order = torch.tensor(by_slot, device=device)
            self.inverse = torch.argsort(self.order)
        self.groups = _group([single[i] for i in by_slot])
        self.slots = torch.tensor([row.slot for row in single], device=device)
        self.positions = torch.tensor([row.start for row in single], device=device)
        chunks, offset = [], self.decoding
        for row in self.rows:
            if row.count > 1:
                chunks.append((offset, row))
                offset += row.count
        self.chunks = tuple(chunks)

    def group_mask(self, group: _Group, window: int | None) -> Tensor | None:
        """Additive [rows, 1, 1, longest] mask of the padding; ``None`` without padding."""
        key = (group.first, -1, window)
        if key not in self._masks:
            self._masks[key] = self._make_group_mask(group, window)
        return self._masks[key]

    def chunk_mask(self, row: StepRow, window: int | None) -> Tensor:
        """Additive causal [count, start + count] mask of a chunk that follows ``start`` earlier tokens."""
        key = (row.slot, row.start, window)
        if key not in self._masks:
            total = row.start + row.count
            query = torch.arange(row.start, total, device=self.store.device)[:, None]
            at = torch.arange(total, device=self.store.device)[None]
            hidden = at > query if window is None else (at > query) | (at <= query - window)
            self._masks[key] = self._additive(hidden, self.store.dtype)
        mask = self._masks[key]
        assert mask is not None
        return mask

    def _make_group_mask(self, group: _Group, window: int | None) -> Tensor | None:
        clipped = window is not None and group.longest > window
        if len(set(group.lengths)) == 1 and not clipped:
            return None
        lengths = torch.tensor(group.lengths, device=self.store.device)[:, None]
        at = torch.arange(group.longest, device=self.store.device)[None]
        hidden = at >= lengths if window is None else (at >= lengths) | (at < lengths - window)
        return self._additive(hidden, self.store.keys.dtype)[:, None, None]

    @staticmethod
    def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _group(rows: Sequence[StepRow]) -> tuple[_Group, ...]:
    """Batch rows of neighbouring slots while the padding costs less than another call would."""
    groups: list[_Group] = []
    first = 0
    for index in range(1, len(rows) + 1):
        lengths = [row.start + 1 for row in rows[first:index]]
        if index < len(rows) and rows[index].slot == rows[index - 1].slot + 1:
            together = (len(lengths) + 1) * max(*lengths, rows[index].start + 1)
            apart = len(lengths) * max(lengths) + rows[index].start + 1
            if together - apart <= CALL_COST_TOKENS:
                continue
        groups.append(_Group(first, index, rows[first].slot, tuple(lengths)))
        first = index
    return tuple(groups) if rows else ()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: StepPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    query: [1, heads, tokens, dim]; key, value: [1, kv_heads, tokens, dim], the step's flat tokens. Stores keys and
    values in their slots, returns ([1, tokens, heads, dim], None). Raises ``ValueError`` for soft-capped
    scores and attention sinks.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError("attention with soft-capped scores or sinks is not supported")
    layer = cast(int, module.layer_idx)
    keys, values = plan.store.keys[layer], plan.store.values[layer]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if plan.decoding:
        keys[plan.slots, :, plan.positions] = k[: plan.decoding].to(keys.dtype)
        values[plan.slots, :, plan.positions] = v[: plan.decoding]
        _attend_decoding(plan, q, out, keys, values, scaling, sliding_window)
    for offset, row in plan.chunks:
        tokens, stored = slice(offset, offset + row.count), slice(row.start, row.start + row.count)
        keys[row.slot, :, stored] = key[0, :, tokens]
        values[row.slot, :, stored] = value[0, :, tokens]
        out[tokens] = _attend_chunk(plan, row, q[tokens], keys, values, scaling, sliding_window)
    return out[None], None


def _attend_decoding(
    plan: StepPlan, q: Tensor, out: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
) -> None:
    """One query per row. Heads that share keys become the query length, so keys are not repeated."""
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[1]
    q = q[: plan.decoding].reshape(plan.decoding, kv_heads, heads // kv_heads, dim)
    if plan.order is not None:
        q = q.index_select(0, plan.order)
    attention = _attend_float32_keys if plan.store.float32_keys else F.scaled_dot_product_attention
    parts = []
    for group in plan.groups:
        slots = slice(group.slot, group.slot + len(group.lengths))
        parts.append(
            attention(
                q[group.first : group.last],
                keys[slots, :, : group.longest],
                values[slots, :, : group.longest],
                attn_mask=plan.group_mask(group, window),
                scale=scale,
            )
        )
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    if plan.inverse is not None:
        result = result.index_select(0, plan.inverse)
    out[: plan.decoding] = result.reshape(plan.decoding, heads, dim)


def _attend_float32_keys(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Attention with float32 keys and scores and bfloat16 queries and values; shapes as in the fused function."""
    wide = query.float().mul_(query.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.matmul(wide, key.transpose(-1, -2))
    if attn_mask is not None:
        scores += attn_mask
    return torch.matmul(scores.softmax(-1).to(value.dtype), value)


def _attend_chunk(
    plan: StepPlan, row: StepRow, q: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """q: [count, heads, dim] -> the same shape. Keys are expanded to the heads as a view."""
    count, heads, dim = q.shape
    kv_heads = keys.shape[1]
    total = row.start + row.count
    shape = (kv_heads, heads // kv_heads, total, dim)
    causal = row.start == 0 and (window is None or total <= window)
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1).reshape(kv_heads, heads // kv_heads, count, dim),
        keys[row.slot, :, :total].to(values.dtype).unsqueeze(1).expand(shape),
        values[row.slot, :, :total].unsqueeze(1).expand(shape),
        attn_mask=None if causal else plan.chunk_mask(row, window),
        is_causal=causal,
        scale=scale,
    )
    return result.reshape(heads, count, dim).transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, attend)
