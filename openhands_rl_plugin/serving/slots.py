"""Key/value storage of the sequences being generated: one growing tensor, one slot per sequence."""

import torch
from torch import Tensor

GROWTH_TOKENS = 256


class SlotStore:
    """`data`: [layers, 2, slots, kv_heads, capacity, head_dim]; index 0 of dimension 1 is keys, 1 is values.

    Slots lie side by side so that a decoding step attends over a view of neighbouring slots, without a copy.
    The capacity (tokens per slot) grows with the longest sequence; memory is touched only where it is used.
    """

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.data = torch.zeros((layers, 2, slots, kv_heads, 0, head_dim), dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Tokens that fit into each slot now."""
        return self.data.shape[4]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take in all layers."""
        layers, two, _, heads, _, dim = self.data.shape
        return layers * two * heads * dim * self.data.element_size()

    def ensure(self, tokens: int) -> None:
        """Grow every slot to hold at least `tokens` tokens; what is stored stays."""
        if tokens <= self.capacity:
            return
        layers, two, slots, heads, old, dim = self.data.shape
        capacity = max(-(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS, old * 3 // 2)
        # zeros, not empty: attention reads past a row's end under a mask, and a stray NaN there would survive it.
        grown = torch.zeros((layers, two, slots, heads, capacity, dim), dtype=self.data.dtype, device=self.data.device)
        if old:
            grown[:, :, :, :, :old] = self.data
        self.data = grown

    def read(self, slot: int, start: int, stop: int) -> Tensor:
        """A copy of the tokens `start:stop` of a slot: [layers, 2, kv_heads, stop - start, head_dim]."""
        return self.data[:, :, slot, :, start:stop].clone()

    def write(self, slot: int, start: int, block: Tensor) -> None:
        """Put a block that `read` gave into a slot, from token `start` on."""
        self.data[:, :, slot, :, start : start + block.shape[3]] = block
