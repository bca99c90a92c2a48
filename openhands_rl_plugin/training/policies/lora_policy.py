"""The model under training: a frozen base in the compute dtype, a LoRA adapter in float32, packed forward passes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE
from openhands_rl_plugin.training.distributed.ranks import is_sharded, shard_layers
from openhands_rl_plugin.training.policies.packed_model import PackedModel, fuse_layers, load_model


def check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise ``TrainingError`` for a target without a layer, which has another name here or is fused into others."""
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if missing := [target for target in targets if target not in names]:
        raise TrainingError(
            f"{model.config.get_text_config().model_type} has no linear layers {', '.join(missing)} (the experts of a "
            "mixture are not trained): set [rl.training] target_modules to some of "
            f"{', '.join(sorted(names - {'lm_head'})[:12])}"
        )


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
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
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
    """PEFT's configuration of the adapter. QLoRA uses PEFT's own layers."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=model_path,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        use_rslora=settings.lora_variant == "rslora",
        lora_dropout=0.0,
        target_modules=list(settings.target_modules),
    )
    if settings.method != "qlora":
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
        return load_model(self.model_path, self.dtype, self.device, quantization_config=quantised, device_map=place)

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
                f"{source} does not fit {self.model_path} with the current lora_rank and target_modules; "
                "use the settings and the base model it was trained with, or start a new adapter"
            )
        with without_renaming(self._base):
            set_peft_model_state_dict(self._peft, tensors)

    def _prepare(self, settings: TrainingSettings) -> None:
        self._split = is_sharded(settings.sharding)  # the base model's layers; the adapter is whole on every rank
        check_targets(self._base, settings.target_modules)
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
