"""Key/value storage of the sequences being generated: growing tensors, one slot per sequence."""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
