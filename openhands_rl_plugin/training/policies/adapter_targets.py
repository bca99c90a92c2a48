"""What of a model an adapter touches, and which servers can serve it: said before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.models.adapters.servers import EmbeddedServer
from openhands_rl_plugin.training.policies.experts import BY_NAME, SeparateExperts, fused_experts, separate_experts

# A layer that several ones of other families are fused into.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
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
    has_experts = bool(fused_experts(model))
    if adapt_experts:
        if not has_experts:
            raise TrainingError(f"{family} has no experts: set [rl.training] adapt_experts = false")
        if not separate_experts(model):
            raise TrainingError(
                f"no server can load adapters of {family}'s experts as they are trained here: set [rl.training] "
                f"adapt_experts = false (families that can be served: {', '.join(sorted(BY_NAME))})"
            )
    found = coverage(model, targets)
    present = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    fused = {
        layer: parts
        for layer, parts in _FUSED.items()
        if layer in present and layer not in targets and set(parts) & set(found.missing)
    }
    if adapt_experts:
        names = BY_NAME[family].layers
        if not set(names) <= set(targets):
            fused[" and ".join(names)] = ("gate_proj", "up_proj", "down_proj")
    if fused:
        replaced = {part for parts in fused.values() for part in parts} & set(found.missing)
        wanted = [target for target in targets if target not in replaced]
        wanted += [name for layers in fused for name in layers.split(" and ") if name not in wanted]
        raise TrainingError(
            f"{family} has other names for {', '.join(sorted(replaced)) or 'its experts'}: {', '.join(fused)}; set "
            f"[rl.training] target_modules = {_toml(wanted)}"
        )
    if not found.adapted:
        raise TrainingError(
            f"{family} has no layers {', '.join(targets)}: set [rl.training] target_modules to some of "
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


def _toml(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
