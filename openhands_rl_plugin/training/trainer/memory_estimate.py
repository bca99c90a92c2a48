"""Estimates the memory of a training run from ``config.json``: no weights are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.training.policies.adapter_targets import prepare_targets

_BYTES = {"auto": 4, "bfloat16": 2, "float32": 4}  # "auto" is one of the others, at most the larger
_OPTIMISED = 16
"""Bytes of a trained parameter in float32: weight, gradient and the two moments of AdamW."""
_QUANTISED_BITS = 4.127
"""Bits per weight in NF4 with double quantisation (arXiv 2305.14314, section 3)."""
_LOGITS = 3 * 128 * 4
"""Bytes for each token of the vocabulary: three copies of the float32 logits of 128 rows."""
_BLOCK = 128
"""Queries whose attention scores exist at a time."""


class ModelShape(BaseModel):
    """The shape of a Llama-like model, from ``config.json``."""

    model_config = ConfigDict(extra="ignore")
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int

    @property
    def width(self) -> int:
        """Width of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def keys(self) -> int:
        """Width of the keys of a token, over all key-value heads."""
        return (self.num_key_value_heads or self.num_attention_heads) * self.width


@dataclass(frozen=True)
class ModelSize:
    """A model's shape and its numbers of parameters: all, outside of its layers, and those that are trained."""

    shape: ModelShape
    parameters: int
    outside: int
    trained: int


@dataclass(frozen=True)
class MemoryEstimate:
    """In bytes, without the memory of Python and torch. ``weights``: with gradients and the optimiser's state."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.activations


def model_size(model: Path, settings: TrainingSettings) -> ModelSize:
    """The size of the model in a directory, and of its trained part. Raises ``TrainingError``."""
    path = model / "config.json"
    try:
        config = path.read_text(encoding="utf-8")
        shape = ModelShape.model_validate_json(config)
        parameters, outside, inputs, outputs = _counts(config, settings.target_modules, settings.adapt_experts)
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"cannot read {path}: {describe(error)} (give a directory of a model)") from error
    # A low-rank term has two matrices, and DoRA's a magnitude for each output.
    adapter = settings.lora_rank * (inputs + outputs) + (outputs if settings.lora_variant == "dora" else 0)
    return ModelSize(shape, parameters, outside, parameters if settings.method == "full" else adapter)


@lru_cache(maxsize=16)
def _counts(config: str, targets: Sequence[str], experts: bool) -> tuple[int, int, int, int]:
    """Parameters of a model, and those outside of its layers; inputs and outputs of all layers with an adapter."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config)))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    outside = sum(size for name, size in sizes.items() if "layers." not in name)
    prepare_targets(model, targets, adapt_experts=experts)
    adapted = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in targets
    ]
    inputs, outputs = sum(layer.in_features for layer in adapted), sum(layer.out_features for layer in adapted)
    return sum(sizes.values()), outside, inputs, outputs


def estimate_memory(model: Path, settings: TrainingSettings, longest: int, processes: int = 1) -> MemoryEstimate:
    """The memory of training with these settings; ``longest``: tokens of the longest sequence, 0 for a micro-batch.

    ``processes``: that of each of so many with ``sharding = "layers"``, after loading. The activations are those of a
    Llama-like model; other architectures need about as much. Raises ``TrainingError`` when the model's files cannot be
    read.
    """
    size, width = model_size(model, settings), _BYTES[settings.dtype]
    shape, layers = size.shape, size.parameters - size.outside
    gathered = 2 * layers // shape.num_hidden_layers * width if processes > 1 else 0
    if settings.method == "full":  # and rounded copies of bfloat16 weights, or of the gathered ones
        each = _OPTIMISED + (width if width == 2 and processes == 1 else 0)
        weights = size.parameters * each // processes + 2 * gathered
    else:
        base = layers * (_QUANTISED_BITS / 8 if settings.method == "qlora" else width)
        weights = int(base) // processes + size.outside * width + gathered + size.trained * _OPTIMISED
    rows, hidden, wide = max(settings.max_tokens_per_micro_batch, longest), shape.hidden_size, shape.intermediate_size
    # Inputs and outputs of two normalisations; queries, keys, values and the attention's output; the gated layer.
    saved = 4 * hidden + 2 * shape.num_attention_heads * shape.width + 2 * shape.keys + 3 * wide
    saved += settings.lora_rank * len(settings.target_modules) if settings.method != "full" else 0
    kept = (
        saved + shape.num_hidden_layers * hidden if settings.gradient_checkpointing else saved * shape.num_hidden_layers
    )
    scores = (longest or rows) * shape.num_attention_heads * _BLOCK * (8 + width)
    activations = rows * width * kept + shape.vocab_size * _LOGITS + max(scores, rows * width * 2 * wide)
    return MemoryEstimate(weights, activations)


def check_fits(model: Path, settings: TrainingSettings, longest: int, free: int | None) -> None:
    """Raise ``TrainingError`` if the weights and the optimiser's state alone are more than the ``free`` bytes."""
    need = estimate_memory(model, settings, longest)
    if free is not None and need.weights > free:
        raise TrainingError(
            f'{model} does not fit: method = "{settings.method}" needs {need.weights / 1e9:.2f} GB for weights, '
            f"gradients and optimiser (about {need.total / 1e9:.2f} GB in all), and {free / 1e9:.2f} GB are free: "
            'train an adapter, method = "lora", or split it among processes with sharding = "layers"'
        )
