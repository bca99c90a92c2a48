"""Key/value storage of the sequences being generated: growing tensors, one slot per sequence."""

from __future__ import annotations

import math
import mmap

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
