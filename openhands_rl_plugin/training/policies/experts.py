"""The experts of a mixture as linear layers again, so that an adapter has a low-rank term for each of them.

transformers 5 stores the experts of a layer in two tensors. PEFT adapts those as ``target_parameters``, in a format
that servers of most families cannot load. The files of these models, and vLLM, have an expert's layers by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class ExpertNames:
    """Names of an expert's layers in the model's files. ``block``: of the mixture there, where it differs from here."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: tuple[str, str] | None = None

    @property
    def layers(self) -> tuple[str, str, str]:
        """The three names."""
        return self.gate, self.up, self.down


_W = ExpertNames("w1", "w3", "w2", block=(".mlp.experts.", ".block_sparse_moe.experts."))

BY_NAME = {
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "ernie4_5_moe",
            "glm4_moe",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
        ),
        ExpertNames(),
    ),
    **dict.fromkeys(("mixtral", "minimax_m2"), _W),
}
"""Families whose experts vLLM loads by these names (its classes with ``is_3d_moe_weight = False`` and LoRA)."""


class SeparateExperts(nn.Module):
    """The experts of one layer; ``self[i]`` has three linear layers that share the memory of the fused weights."""

    def __init__(self, fused: nn.Module, names: ExpertNames) -> None:
        super().__init__()
        gate_up, down = fused.get_parameter("gate_up_proj"), fused.get_parameter("down_proj")
        self.names = names
        self.act_fn = fused.act_fn
        self.count = gate_up.shape[0]
        width = down.shape[2]
        for at in range(self.count):
            expert = nn.Module()
            for name, weight in zip(names.layers, (gate_up[at, :width], gate_up[at, width:], down[at]), strict=True):
                setattr(expert, name, _linear(weight))
            self.add_module(str(at), expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [N, width]; top_k_index, top_k_weights: [N, k] -> [N, width]."""
        output = torch.zeros_like(hidden_states)
        chosen = F.one_hot(top_k_index, num_classes=self.count + 1).permute(2, 1, 0)
        for at in chosen[: self.count].sum((1, 2)).nonzero().flatten().tolist():
            place, token = torch.where(chosen[at])
            expert = self.get_submodule(str(at))
            gate, up, down = (expert.get_submodule(name) for name in self.names.layers)
            x = hidden_states[token]
            y = down(self.act_fn(gate(x)) * up(x)) * top_k_weights[token, place, None]  # pyright: ignore[reportCallIssue]
            output.index_add_(0, token, y.to(output.dtype))
        return output


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the weights of several experts in one tensor, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(weight.ndim == 3 and "proj" in own for own, weight in module.named_parameters(recurse=False))
    }


def separate_experts(model: PreTrainedModel) -> bool:
    """Replace the experts of ``model`` by ``SeparateExperts``; ``False`` for a family whose names are not known."""
    names = BY_NAME.get(model.config.get_text_config().model_type)
    found = fused_experts(model)
    known = {"gate_up_proj", "down_proj"}
    if names is None or any(set(dict(each.named_parameters())) != known for each in found.values()):
        return False
    for name, fused in found.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, SeparateExperts(fused, names))
    return True


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made
