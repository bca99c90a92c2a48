"""Key/value storage of the sequences being generated: growing tensors, one slot per sequence."""

import torch
from torch import Tensor

GROWTH_TOKENS = 256


class SlotStore:
    """`keys`, `values`: [layers, slots, kv_heads, capacity, head_dim].

    Slots lie side by side so that a decoding step attends over a view of neighbouring slots, without a copy.
    The capacity (tokens per slot) grows with the longest sequence; memory is touched only where it is used.

    On a CPU, bfloat16 keys are kept as float32: for the one query of a decoding row, the float32 product is more than
    twice as fast as the bfloat16 one, and its scores are not rounded.
    """

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.wide_keys = device.type == "cpu" and dtype == torch.bfloat16
        self._shape = (layers, slots, kv_heads, head_dim)
        self.keys = self._zeros(0, torch.float32 if self.wide_keys else dtype)
        self.values = self._zeros(0, dtype)

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
        """Grow every slot to hold at least `tokens` tokens; what is stored stays."""
        if tokens > self.capacity:
            capacity = max(-(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS, self.capacity * 3 // 2)
            self.keys = self._grown(self.keys, capacity)
            self.values = self._grown(self.values, capacity)

    def read(self, slot: int, start: int, stop: int) -> Tensor:
        """A copy of the tokens `start:stop` of a slot: [layers, 2 (keys, values), kv_heads, tokens, head_dim]."""
        layers, _, heads, dim = self._shape
        block = torch.empty((layers, 2, heads, stop - start, dim), dtype=self.dtype, device=self.device)
        block[:, 0] = self.keys[:, slot, :, start:stop]
        block[:, 1] = self.values[:, slot, :, start:stop]
        return block

    def write(self, slot: int, start: int, block: Tensor) -> None:
        """Put a block that `read` gave into a slot, from token `start` on."""
        stop = start + block.shape[3]
        self.keys[:, slot, :, start:stop] = block[:, 0]
        self.values[:, slot, :, start:stop] = block[:, 1]

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = self._zeros(capacity, old.dtype)
        new[:, :, :, : old.shape[3]] = old
        return new

    def _zeros(self, capacity: int, dtype: torch.dtype) -> Tensor:
        layers, slots, heads, dim = self._shape
        # zeros, not empty: attention reads past a row's end under a mask, and a stray NaN there would survive it.
        return torch.zeros((layers, slots, heads, capacity, dim), dtype=dtype, device=self.device)
