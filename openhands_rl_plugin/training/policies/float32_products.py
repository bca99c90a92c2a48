"""Products of float32 matrices on a GPU: by tensor cores (TF32), except for the positions of rotary embeddings.

In a bfloat16 model few are left: routers, linear attention, PEFT's own LoRA layers (DoRA, quantised models).
"""

from __future__ import annotations

import torch
from torch import nn


def use_tensor_cores(device: torch.device) -> None:
    """Let this process multiply float32 matrices on a GPU with factors of 10 bits (TF32), eight times as fast."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def keep_positions_exact(model: nn.Module) -> None:
    """Multiply positions by rotary frequencies in full float32: with 10 bits, tokens 2049 and 2050 are at one place."""
    for module in model.modules():
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            _ExactProducts(module)


class _ExactProducts:
    """Full float32 products while ``module`` runs."""

    def __init__(self, module: nn.Module) -> None:
        self._before = torch.get_float32_matmul_precision()
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: object) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def _end(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._before)
