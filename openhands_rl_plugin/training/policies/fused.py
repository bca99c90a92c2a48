"""Normalisation and gated feed-forward layers that save half as much for the backward pass.

On a CPU these layers are bound by memory bandwidth: transformers' versions save every intermediate result, some of them
in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "SmolLM3RMSNorm"})
GATED = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP"})


def fuse_layers(model: PreTrainedModel) -> None:
    """Replace the layers whose class is in ``NORMS`` or ``GATED``.

    The names of the linear layers do not change, so that adapters fit.
    """
    gated = GATED if getattr(model.config, "hidden_act", None) == "silu" else frozenset[str]()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in NORMS:
                setattr(parent, name, FusedNorm(child))
            elif type(child).__name__ in gated:
                setattr(parent, name, FusedGate(child))


class FusedNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, computed in float32."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.weight = original.get_parameter("weight")
        self.eps = float(original.variance_epsilon)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width] -> the same shape."""
        return _Norm.apply(x, self.weight, self.eps)


class FusedGate(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.gate_proj = original.get_submodule("gate_proj")
        self.up_proj = original.get_submodule("up_proj")
        self.down_proj = original.get_submodule("down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width] -> the same shape."""
        return self.down_proj(_Gate.apply(self.gate_proj(x), self.up_proj(x)))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad,) = grad_outputs
        x, weight, scale = ctx.saved_tensors
        normal = x.float() * scale
        slope_of_weight = None
        if ctx.needs_input_grad[1]:
            slope_of_weight = (grad.float() * normal).flatten(0, -2).sum(0).to(weight.dtype)
        slope = (grad * weight).float()
        shared = (slope * normal).mean(-1, keepdim=True).neg_()
        return slope.addcmul_(normal, shared).mul_(scale).to(x.dtype), slope_of_weight, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grad_outputs
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
