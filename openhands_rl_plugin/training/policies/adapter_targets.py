"""What of a model an adapter touches, and which servers can serve it, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.models.adapters.servers import EmbeddedServer

SERVED_EXPERTS = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "olmoe"),
        *("qwen2_moe", "qwen3_moe", "qwen3_next"),
    )
)
"""Families whose experts vLLM loads by ``EXPERT_LAYERS`` (its classes with ``is_3d_moe_weight = False`` and LoRA)."""

EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj")


class SeparateExperts(nn.Module):
    """The experts of one layer; ``self[i]`` has three linear layers that share the memory of the fused weights."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        gate_up, down = fused.get_parameter("gate_up_proj"), fused.get_parameter("down_proj")
        self.act_fn = fused.act_fn
        self.count = gate_up.shape[0]
        width = down.shape[2]
        for at in range(self.count):
            expert = nn.Module()
            parts = gate_up[at, :width], gate_up[at, width:], down[at]
            for name, weight in zip(EXPERT_LAYERS, parts, strict=True):
                layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
                layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
                setattr(expert, name, layer)
            self.add_module(str(at), expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [N, width]; top_k_index, top_k_weights: [N, k] -> [N, width]."""
        output = torch.zeros_like(hidden_states)
        chosen = F.one_hot(top_k_index, num_classes=self.count + 1).permute(2, 1, 0)
        for at in chosen[: self.count].sum((1, 2)).nonzero().flatten().tolist():
            place, token = torch.where(chosen[at])
            gate, up, down = (self.get_submodule(f"{at}.{name}") for name in EXPERT_LAYERS)
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


# vLLM 0.32 has no adapters for these, or not the model.
_NOT_BY_VLLM = frozenset({"bloom", "mamba", "mamba2", "rwkv", "xlstm", "recurrent_gemma"})


@dataclass(frozen=True)
class Coverage:
    """Numbers of base weights. ``missing``: targets without a layer; ``left_out``: those in experts without adapter."""

    total: int
    adapted: int
    experts: int
    left_out: int
    missing: tuple[str, ...]

    @property
    def share(self) -> float:
        """The share of the weights that has a low-rank term."""
        return self.adapted / self.total


def coverage(model: nn.Module, targets: Sequence[str]) -> Coverage:
    """What an adapter of linear layers with these names touches."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = {name: module.weight.numel() for name, module in linears.items() if _is_target(name, targets)}
    fused = sum(weight.numel() for module in fused_experts(model).values() for weight in module.parameters())
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, SeparateExperts))
    separate = {name: module.weight.numel() for name, module in linears.items() if name.startswith(prefixes or "\0")}
    own = sum(weight.numel() for weight in model.parameters())
    return Coverage(
        total=own,
        adapted=sum(chosen.values()),
        experts=fused + sum(separate.values()),
        left_out=fused + sum(size for name, size in separate.items() if name not in chosen),
        missing=tuple(target for target in targets if not any(_is_target(name, (target,)) for name in linears)),
    )


def prepare_targets(model: PreTrainedModel, targets: Sequence[str], *, adapt_experts: bool) -> Coverage:
    """Make layers of the experts, if wanted, and check the targets.

    Raises ``TrainingError`` where the targets would adapt a part of what they name: layers that are fused here or have
    other names, or experts that no server could load.
    """
    family = model.config.get_text_config().model_type
    if adapt_experts:
        fused = fused_experts(model)
        if not fused or family not in SERVED_EXPERTS or not {*EXPERT_LAYERS} <= {*targets}:
            raise TrainingError(
                f"no server can load adapters of {family}'s experts with these target_modules: set [rl.training] "
                f"adapt_experts = false, or add {', '.join(EXPERT_LAYERS)} for a model of "
                f"{', '.join(sorted(SERVED_EXPERTS))}"
            )
        for name, module in fused.items():
            model.set_submodule(name, SeparateExperts(module))
    found = coverage(model, targets)
    if not found.adapted or (found.missing and not found.experts):
        present = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        raise TrainingError(
            f"{family} has no layers {', '.join(found.missing)}: set [rl.training] target_modules to some of "
            f"{', '.join(sorted(present - {'lm_head'})[:12])}"
        )
    return found


def servers_of(model: PreTrainedModel, *, packed: bool, experts: bool) -> tuple[str, ...]:
    """The servers that can serve an adapter of linear layers of this model, as far as is known before one is asked.

    ``packed``: whether its attention can be replaced. The embedded server replaces it too, and its slots hold keys and
    values of one width.
    """
    config = model.config.get_text_config()
    vllm = () if config.model_type in _NOT_BY_VLLM else ("vLLM",)
    slots = packed and not hasattr(config, "kv_lora_rank")
    return (*vllm, EmbeddedServer.NAME) if slots and not experts else vllm


def describe_targets(found: Coverage, targets: Sequence[str], servers: Sequence[str]) -> list[str]:
    """What a user should know before training, a line each: weights, servers, experts."""
    named = ", ".join(target for target in targets if target not in found.missing)
    absent = f"; no such layers here: {', '.join(found.missing)}" if found.missing else ""
    able = f"can be served by {' and '.join(servers)}" if servers else "no known server can load it"
    lines = [f"the adapter touches {_percent(found.share)} of the weights ({named}{absent}); {able}"]
    if found.left_out:
        lines.append(
            f"the experts ({_percent(found.left_out / found.total)} of the weights) are not adapted; adapt_experts = "
            "true adds them where vLLM can load them"
        )
    if found.experts:
        lines.append(
            "the experts that a server chose are not recorded: the trainer routes anew, and corrects no difference"
        )
    return lines


@contextmanager
def without_renaming(model: PreTrainedModel) -> Iterator[None]:
    """Keep PEFT from turning names of layers into ``target_parameters`` for the fused experts of transformers 5."""
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    kinds = [(config, config.model_type) for config in configs]
    for config in configs:
        setattr(config, "model_type", "")  # noqa: B010 - a class variable, which is hidden for the moment
    try:
        yield
    finally:
        for config, kind in kinds:
            setattr(config, "model_type", kind)  # noqa: B010


def _is_target(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1g} %"
