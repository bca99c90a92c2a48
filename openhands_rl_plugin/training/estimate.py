"""How much memory a training run will want, from the model's files alone: nothing is loaded, torch is not needed."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from openhands_rl_plugin.errors import TrainingError, describe
from openhands_rl_plugin.settings import TrainingSettings

_BYTES = {"auto": 4, "bfloat16": 2, "float32": 4}  # "auto" is one of the others, at most the larger
_ADAPTER_BYTES = 16
"""Of an adapter's parameter: weight, gradient and two moments of AdamW, all float32."""

_LOGIT_ROWS, _LOGIT_COPIES = 128, 3
_LARGEST_HEADER = 100 * 1024 * 1024


@dataclass(frozen=True)
class MemoryEstimate:
    """In bytes. ``activations`` are those of a pass that is as long as it may be."""

    weights: int
    adapter: int
    activations: int

    @property
    def total(self) -> int:
        """All of it; Python and torch themselves come on top."""
        return self.weights + self.adapter + self.activations


class _Shape(BaseModel):
    model_config = ConfigDict(extra="ignore")
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int


class _Entry(BaseModel):
    model_config = ConfigDict(extra="ignore")
    shape: tuple[int, ...]


def estimate_memory(model: Path, settings: TrainingSettings, longest: int) -> MemoryEstimate:
    """The memory of training with these settings, where ``longest`` is the length of the longest sequence in tokens.

    Counts what the trainer keeps for the backward pass of a Llama-like model; other architectures are near it. Raises
    ``TrainingError`` when the model's files cannot be read.
    """
    shape = _shape(model)
    size = _BYTES[settings.dtype]
    parameters, adapted = 0, 0
    for name, dimensions in _tensors(model):
        count = 1
        for dimension in dimensions:
            count *= dimension
        parameters += count
        if len(dimensions) == 2 and name.removesuffix(".weight").rpartition(".")[2] in settings.target_modules:
            adapted += settings.lora_rank * sum(dimensions)
    rows = max(settings.max_tokens_per_pass, longest)
    logits = _LOGIT_ROWS * shape.vocab_size * 4 * _LOGIT_COPIES
    return MemoryEstimate(
        weights=parameters * size,
        adapter=adapted * _ADAPTER_BYTES,
        activations=rows * size * _numbers_a_token(shape, settings) + logits,
    )


def _numbers_a_token(shape: _Shape, settings: TrainingSettings) -> int:
    """What one token leaves for the backward pass, in numbers of the compute dtype."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    width = shape.head_dim or hidden // heads
    keys = (shape.num_key_value_heads or heads) * width
    # Two normalisations with their inputs and outputs; queries, keys, values and what comes out; the gated layer.
    layer = 4 * hidden + 2 * heads * width + 2 * keys + 3 * shape.intermediate_size
    if settings.gradient_checkpointing:
        return shape.num_hidden_layers * hidden + layer
    return shape.num_hidden_layers * layer


def _shape(model: Path) -> _Shape:
    path = model / "config.json"
    try:
        return _Shape.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise TrainingError(
            f"cannot read {path}: {describe(error)} (give a directory with config.json and *.safetensors)"
        ) from error


def _tensors(model: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, from the headers of the safetensors files."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise TrainingError(f"{model} holds no *.safetensors files")
    for path in files:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > _LARGEST_HEADER:
                    raise ValueError("its header is too long")
                header = json.loads(file.read(length))
            found = [(name, _Entry.model_validate(header[name]).shape) for name in header if name != "__metadata__"]
        except (OSError, ValueError, struct.error) as error:
            raise TrainingError(f"cannot read {path}: {describe(error)}") from error
        yield from found
