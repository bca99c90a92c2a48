"""The model under training: a frozen base in the compute dtype, a LoRA adapter in float32, packed forward passes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners import lora
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE
from openhands_rl_plugin.models.adapters.servers import EmbeddedServer
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE
from openhands_rl_plugin.training.distributed.ranks import is_sharded, shard_layers
from openhands_rl_plugin.training.policies.packed_model import PackedModel, fuse_layers, load_model

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


def adapter_config(settings: TrainingSettings, model_path: str) -> LoraConfig:
    """PEFT's configuration of the adapter. DoRA and QLoRA use PEFT's own layers: the fused step has no magnitudes."""
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
    if settings.method != "qlora" and not dora:
        config._register_custom_module(CUSTOM_LAYERS)
    return config


class TrainablePolicy(PackedModel):
    """A causal language model with one LoRA adapter. Raises ``TrainingError`` when the model cannot be trained.

    With ``method = "qlora"`` (Dettmers et al. 2023, arXiv 2305.14314) the base is in bitsandbytes' NF4 with double
    quantisation.
    """

    def _open(self, settings: TrainingSettings) -> PreTrainedModel:
        if settings.method != "qlora":
            return super()._open(settings)
        # Wider: a server's base is not quantised, which moves logprobs by a tenth of a nat and more.
        self.probe_tolerance = 0.5
        quantised = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.dtype,
        )
        place = {"": torch.device(self.device)}
        try:
            return load_model(self.model_path, self.dtype, self.device, quantization_config=quantised, device_map=place)
        except (RuntimeError, AttributeError) as error:
            raise TrainingError(
                f'{self.model_path} cannot be quantised here: {describe(error)}; set method = "lora"'
            ) from error

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Disable the adapter inside the block."""
        with self._peft.disable_adapter():
            yield

    def save(self, directory: Path) -> None:
        """Write the adapter in PEFT's format into an existing directory."""
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.weights().items()}
        # Not save_file: its error for a full disk is not an OSError.
        (directory / WEIGHTS_FILE).write_bytes(serialize(weights, {"format": "pt"}))
        config = self._peft.peft_config["default"]
        inference = {**config.to_dict(), "inference_mode": True}
        text = json.dumps({k: sorted(v) if isinstance(v, set) else v for k, v in inference.items()}, indent=2)
        (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")

    def weights(self) -> dict[str, Tensor]:
        """The adapter's tensors under their names in PEFT's file."""
        return get_peft_model_state_dict(self._peft)

    def load(self, directory: Path) -> None:
        """Load the weights of an adapter directory. Raises ``TrainingError`` when they do not fit."""
        try:
            tensors = load_file(directory / WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"cannot read the adapter in {directory}: {describe(error)}") from error
        self.set_weights(tensors, str(directory))

    def set_weights(self, tensors: dict[str, Tensor], source: str) -> None:
        """Load adapter tensors. Raises ``TrainingError`` when names or shapes differ."""
        mine = {name: tuple(tensor.shape) for name, tensor in self.weights().items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if mine != theirs:
            raise TrainingError(
                f"{source} does not fit {self.model_path} with the current lora_rank, target_modules and "
                "adapt_experts; use the settings and the base model it was trained with, or start a new adapter"
            )
        with without_renaming(self._base):
            set_peft_model_state_dict(self._peft, tensors)

    def notes(self) -> list[str]:
        """As of every model, and what the adapter touches and who can serve it."""
        return [*super().notes(), *describe_targets(self._coverage, self._targets, self.servers)]

    @property
    def servers(self) -> tuple[str, ...]:
        """The servers that can serve the adapter, as far as is known before one is asked."""
        experts = self._coverage.experts > self._coverage.left_out
        return servers_of(self._base, packed=self.packing.packed, experts=experts) if self._servable else ()

    def _prepare(self, settings: TrainingSettings) -> None:
        self._targets, self._servable = settings.target_modules, settings.lora_variant != "dora"
        self._split = is_sharded(settings.sharding)  # the base model's layers; the adapter is whole on every rank
        self._coverage = prepare_targets(self._base, self._targets, adapt_experts=settings.adapt_experts)
        fuse_layers(self._base)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(settings.seed)
            with without_renaming(self._base):
                self._peft = get_peft_model(self._base, adapter_config(settings, self.model_path))

    def _trained(self) -> dict[str, nn.Parameter]:
        trained = {name: p for name, p in self._peft.named_parameters() if p.requires_grad}
        if self._split:
            shard_layers(self._base, trained.values(), self.device)
        return trained
