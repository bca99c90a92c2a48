"""LoRA layers for training: frozen base weights, float32 adapter weights, one fused step forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners import lora
from torch import Tensor, nn

from openhands_rl_plugin.config.rl import TrainingSettings


class TrainableLinear(lora.Linear):
    """PEFT's LoRA layer with the same parameters and result, but without its cast of activations to float32.

    Adapter weights are rounded to the base's dtype when used (as in a server); their gradients are float32.
    """

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """x: [..., in] -> [..., out]."""
        if self.disable_adapters:
            return self.base_layer(x)
        (name,) = self.active_adapters
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        base = self.get_base_layer()
        y = _LoraLinear.apply(x.reshape(-1, x.shape[-1]), base.weight, base.bias, down, up, float(self.scaling[name]))
        return y.view(*x.shape[:-1], y.shape[-1])


class _LoraLinear(torch.autograd.Function):
    """``y = x W^T + b + (x A^T) (scaling B)^T`` with W and b frozen; x: [N, in], A: [rank, in], B: [out, rank]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
    ) -> Tensor:
        low_down, low_up = down.to(x.dtype), (up * scaling).to(x.dtype)
        inner = F.linear(x, low_down)
        y = F.linear(x, weight, bias)
        y.addmm_(inner, low_up.t())
        ctx.save_for_backward(x, weight, low_down, low_up, inner)
        ctx.scaling = scaling
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        (grad,) = grad_outputs
        x, weight, low_down, low_up, inner = ctx.saved_tensors
        grad_inner = grad @ low_up
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            grad_x.addmm_(grad_inner, low_down)
        grad_down = (grad_inner.t() @ x).float()
        grad_up = (grad.t() @ inner).float().mul_(ctx.scaling)
        return grad_x, None, None, grad_down, grad_up, None


CUSTOM_LAYERS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: TrainableLinear}


def adapter_config(settings: TrainingSettings, model_path: str, *, custom_layers: bool = True) -> LoraConfig:
    """PEFT's configuration of the adapter. DoRA uses PEFT's own layers, because the fused step has no magnitudes."""
    dora = settings.lora_variant == "dora"
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=model_path,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        use_rslora=settings.lora_variant == "rslora",
        use_dora=dora,
        lora_dropout=0.0,
        target_modules=list(settings.target_modules),
    )
    if custom_layers and not dora:
        config._register_custom_module(CUSTOM_LAYERS)
    return config
