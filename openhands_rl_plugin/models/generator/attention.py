"""Attention over slots: short rows in batches of neighbouring slots, prompt chunks one by one."""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from openhands_rl_plugin.models.generator.lora import LoadedAdapter

GROWTH_TOKENS = 256

# Else the pages would be those of a shared file; other systems than Unix know no such flags.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class KVCache:
    """``keys``, ``values``: [layers, slots, kv_heads, capacity, head_dim].

    Slots lie side by side so that a decoding step attends over a view of neighbouring slots, without a copy.
    The capacity (tokens per slot) grows with the longest sequence; on a CPU, memory is taken only where it is used.

    On a CPU, bfloat16 keys are kept as float32: for the one query of a decoding row, the float32 product is more than
    twice as fast as the bfloat16 one, and its scores are not rounded.
    """

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.float32_keys = device.type == "cpu" and dtype == torch.bfloat16
        self._shape = (layers, slots, kv_heads, head_dim)
        self.clear()

    @property
    def capacity(self) -> int:
        """Tokens that fit into each slot now."""
        return self.values.shape[3]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of capacity takes, in all slots and layers together."""
        layers, slots, heads, dim = self._shape
        return layers * slots * heads * dim * (self.keys.element_size() + self.values.element_size())

    def ensure(self, tokens: int) -> None:
        """Grow every slot to hold at least ``tokens`` tokens; what is stored stays."""
        if tokens > self.capacity:
            capacity = max(-(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS, self.capacity * 3 // 2)
            self.keys = self._grown(self.keys, capacity)
            self.values = self._grown(self.values, capacity)

    def clear(self) -> None:
        """Forget all sequences, and give their memory back."""
        self.keys = self._zeros(0, torch.float32 if self.float32_keys else self.dtype)
        self.values = self._zeros(0, self.dtype)

    def read(self, slot: int, start: int, stop: int) -> Tensor:
        """A copy of the tokens ``start:stop`` of a slot: [layers, 2 (keys, values), kv_heads, tokens, head_dim]."""
        layers, _, heads, dim = self._shape
        block = torch.empty((layers, 2, heads, stop - start, dim), dtype=self.dtype, device=self.device)
        block[:, 0] = self.keys[:, slot, :, start:stop]
        block[:, 1] = self.values[:, slot, :, start:stop]
        return block

    def write(self, slot: int, start: int, block: Tensor) -> None:
        """Put a block that ``read`` gave into a slot, from token ``start`` on."""
        stop = start + block.shape[3]
        self.keys[:, slot, :, start:stop] = block[:, 0]
        self.values[:, slot, :, start:stop] = block[:, 1]

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = self._zeros(capacity, old.dtype)
        new[:, :, :, : old.shape[3]] = old
        return new

    def _zeros(self, capacity: int, dtype: torch.dtype) -> Tensor:
        layers, slots, heads, dim = self._shape
        # Zeros: attention reads past a row's end under a mask, and a stray NaN there would survive it.
        shape = (layers, slots, heads, capacity, dim)
        if self.device.type != "cpu" or not capacity:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return _untouched_zeros(shape, dtype)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory page by page as they are written; torch writes all of its own."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **_PRIVATE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


BLOCK_TOKENS = 16
_NODE_BYTES = 2048
"""What Python and torch keep for a block beside its keys and values."""
Block = tuple[int, ...]


@dataclass(eq=False)
class _Node:
    owner: Hashable
    parent: _Node | None = None
    tokens: Block = ()
    kv: Tensor | None = None
    children: dict[Block, _Node] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefixMatch:
    """The cached prefix of a prompt.

    ``blocks``: keys and values of its first ``len(blocks) * BLOCK_TOKENS`` tokens. ``missing`` identifies the first
    full block that is not cached (``None`` when all are), so that two prompts that need the same block are recognised.
    """

    blocks: tuple[Tensor, ...]
    missing: tuple[Hashable, Block] | None


class PrefixCache:
    """Evicts the least recently used blocks when ``max_bytes`` is exceeded. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._roots: dict[Hashable, _Node] = {}
        # Oldest first. A path is touched leaf first, so a node is never older than its descendants and the
        # oldest node is always a leaf.
        self._by_age: OrderedDict[_Node, None] = OrderedDict()

    def match(self, owner: Hashable, ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix of ``ids`` (never all of it: the last token must be computed)."""
        node = self._roots.get(owner) or _Node(owner)
        found: list[_Node] = []
        missing: tuple[Hashable, Block] | None = None
        for block in _full_blocks(ids, len(ids) - 1):
            child = node.children.get(block)
            if child is None:
                missing = ((owner, len(found), found[-1] if found else None), block)
                break
            node = child
            found.append(node)
        self._touch(found)
        return PrefixMatch(tuple(n.kv for n in found if n.kv is not None), missing)

    def insert(self, owner: Hashable, ids: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Add the full blocks of ``ids`` that are new; ``read(start, stop)`` copies their keys and values."""
        if not self.max_bytes:
            return
        node = self._roots.setdefault(owner, _Node(owner))
        path: list[_Node] = []
        for index, block in enumerate(_full_blocks(ids, len(ids))):
            child = node.children.get(block)
            if child is None:
                start = index * BLOCK_TOKENS
                child = _Node(owner, node, block, read(start, start + BLOCK_TOKENS))
                node.children[block] = child
                self.bytes += _size(child)
            node = child
            path.append(node)
        self._touch(path)
        while self.bytes > self.max_bytes:
            self._remove(next(iter(self._by_age)))

    def drop(self, owner: Hashable) -> None:
        """Remove all blocks of an adapter version."""
        root = self._roots.pop(owner, None)
        pending = list(root.children.values()) if root else []
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            del self._by_age[node]
            self.bytes -= _size(node)

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._by_age[node] = None
            self._by_age.move_to_end(node)

    def _remove(self, leaf: _Node) -> None:
        del self._by_age[leaf]
        self.bytes -= _size(leaf)
        if leaf.parent is not None:
            del leaf.parent.children[leaf.tokens]


def _full_blocks(ids: Sequence[int], limit: int) -> list[Block]:
    stops = range(BLOCK_TOKENS, limit + 1, BLOCK_TOKENS)
    return [tuple(ids[stop - BLOCK_TOKENS : stop]) for stop in stops]


def _size(node: _Node) -> int:
    return 0 if node.kv is None else node.kv.numel() * node.kv.element_size() + _NODE_BYTES


ATTENTION_NAME = "openhands_rl_slots"

# A kernel call costs as much as attending to about this many tokens (measured on 2 cores: 90 us per call, 0.11 us per
# token and row), so rows are batched while their padding costs less.
CALL_COST_TOKENS = 400

SHORT_ROW_TOKENS = 16
"""Rows of at most as many tokens, those that decode, are batched."""


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

    @property
    def is_short(self) -> bool:
        """Whether it is computed in a batch with others."""
        return len(self.ids) <= SHORT_ROW_TOKENS


@dataclass(frozen=True)
class _Group:
    """Short rows that lie in neighbouring slots starting at ``slot``, each with ``width`` queries.

    ``queries`` [rows * width]: the token of the step that each query is; a row with fewer tokens repeats its last one.
    ``tokens``: all tokens of these rows, and ``places``: where they are among the queries.
    """

    slot: int
    rows: tuple[StepRow, ...]
    width: int
    queries: Tensor
    tokens: Tensor
    places: Tensor

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in each slot after the step."""
        return tuple(row.start + row.count for row in self.rows)


@dataclass
class StepPlan:
    """The slot and position of each token of one flat step. Short rows come first, then prompt chunks."""

    store: KVCache
    rows: Sequence[StepRow]
    groups: tuple[_Group, ...] = field(init=False)
    chunks: tuple[tuple[int, StepRow], ...] = field(init=False)
    short: int = field(init=False)
    slots: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    _masks: dict[tuple[int, int, int | None], Tensor | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        device = self.store.device
        placed, offset = list[tuple[int, StepRow]](), 0
        for row in self.rows:
            placed.append((offset, row))
            offset += row.count
        short = [(at, row) for at, row in placed if row.is_short]
        self.chunks = tuple((at, row) for at, row in placed if not row.is_short)
        self.short = sum(row.count for _, row in short)
        self.slots = torch.tensor([row.slot for _, row in short for _ in row.ids], device=device)
        self.positions = torch.tensor([row.start + at for _, row in short for at in range(row.count)], device=device)
        by_slot = sorted(short, key=lambda item: item[1].slot)
        self.groups = tuple(_padded(by_slot[first:last], device) for first, last in _groups([r for _, r in by_slot]))

    def group_mask(self, group: _Group, heads: int, window: int | None) -> Tensor | None:
        """Additive [rows, 1, heads * width, longest] mask of what a query does not see; ``None`` if each sees all.

        ``heads``: those that share keys.
        """
        key = (group.slot, -1, window)
        if key not in self._masks:
            self._masks[key] = self._make_group_mask(group, heads, window)
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

    def _make_group_mask(self, group: _Group, heads: int, window: int | None) -> Tensor | None:
        lengths, longest = group.lengths, max(group.lengths)
        clipped = window is not None and longest > window
        if group.width == 1 and len(set(lengths)) == 1 and not clipped:
            return None
        positions = [[row.start + min(at, row.count - 1) for at in range(group.width)] for row in group.rows]
        query = torch.tensor(positions, device=self.store.device)[:, None, :, None]
        at = torch.arange(longest, device=self.store.device)
        hidden = at > query if window is None else (at > query) | (at <= query - window)
        mask = self._additive(hidden, self.store.keys.dtype)
        return mask.expand(-1, heads, -1, -1).reshape(len(group.rows), 1, heads * group.width, longest)

    @staticmethod
    def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _groups(rows: Sequence[StepRow]) -> Iterator[tuple[int, int]]:
    """Batch rows of neighbouring slots while the padding costs less than another call would."""
    first = 0
    for index in range(1, len(rows) + 1):
        lengths = [row.start + row.count for row in rows[first:index]]
        if index < len(rows) and rows[index].slot == rows[index - 1].slot + 1:
            following = rows[index].start + rows[index].count
            together = (len(lengths) + 1) * max(*lengths, following)
            apart = len(lengths) * max(lengths) + following
            if together - apart <= CALL_COST_TOKENS:
                continue
        yield first, index
        first = index


def _padded(placed: Sequence[tuple[int, StepRow]], device: torch.device) -> _Group:
    width = max(row.count for _, row in placed)
    queries = [offset + min(at, row.count - 1) for offset, row in placed for at in range(width)]
    tokens = [offset + at for offset, row in placed for at in range(row.count)]
    places = [index * width + at for index, (_, row) in enumerate(placed) for at in range(row.count)]
    indices = (torch.tensor(each, device=device) for each in (queries, tokens, places))
    return _Group(placed[0][1].slot, tuple(row for _, row in placed), width, *indices)


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
    if plan.short:
        keys[plan.slots, :, plan.positions] = k[: plan.short].to(keys.dtype)
        values[plan.slots, :, plan.positions] = v[: plan.short]
        _attend_short(plan, q, out, keys, values, scaling, sliding_window)
    for offset, row in plan.chunks:
        tokens, stored = slice(offset, offset + row.count), slice(row.start, row.start + row.count)
        keys[row.slot, :, stored] = key[0, :, tokens]
        values[row.slot, :, stored] = value[0, :, tokens]
        out[tokens] = _attend_chunk(plan, row, q[tokens], keys, values, scaling, sliding_window)
    return out[None], None


def _attend_short(
    plan: StepPlan, q: Tensor, out: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
) -> None:
    """A few queries per row. Heads that share keys become further queries, so keys are not repeated."""
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[1]
    shared = heads // kv_heads
    attention = _attend_float32_keys if plan.store.float32_keys else F.scaled_dot_product_attention
    for group in plan.groups:
        rows, width, longest = len(group.rows), group.width, max(group.lengths)
        query = q.index_select(0, group.queries).view(rows, width, kv_heads, shared, dim)
        slots = slice(group.slot, group.slot + rows)
        result = attention(
            query.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, shared * width, dim),
            keys[slots, :, :longest],
            values[slots, :, :longest],
            attn_mask=plan.group_mask(group, shared, window),
            scale=scale,
        )
        result = result.view(rows, kv_heads, shared, width, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
        out[group.tokens] = result if width == 1 else result.index_select(0, group.places)


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
