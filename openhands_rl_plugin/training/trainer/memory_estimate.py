"""Estimates the memory of a training run from the model's files: nothing is loaded, torch is not needed."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe

_BYTES = {"auto": 4, "bfloat16": 2, "float32": 4}  # "auto" is one of the others, at most the larger
_OPTIMISED = 16
"""Bytes of a trained parameter in float32: weight, gradient and the two moments of AdamW."""
_QUANTISED_BITS = 4.127
"""Bits per weight in NF4 with double quantisation (arXiv 2305.14314, section 3)."""
_LOGITS = 3 * 128 * 4
"""Bytes for each token of the vocabulary: three copies of the float32 logits of 128 rows."""
_BLOCK = 128
"""Queries whose attention scores exist at a time."""
_LARGEST_HEADER = 100 * 1024 * 1024


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
    tie_word_embeddings: bool = False

    @property
    def width(self) -> int:
        """Width of an attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def keys(self) -> int:
        """Width of the keys of a token, over all key-value heads."""
        return (self.num_key_value_heads or self.num_attention_heads) * self.width

    def matrices(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the matrices, where there are no files of weights."""
        hidden, wide, queries = self.hidden_size, self.intermediate_size, self.num_attention_heads * self.width
        layer = {"q_proj": (queries, hidden), "k_proj": (self.keys, hidden), "v_proj": (self.keys, hidden)}
        layer |= {"o_proj": (hidden, queries), "gate_proj": (wide, hidden), "up_proj": (wide, hidden)}
        layer |= {"down_proj": (hidden, wide)}
        outside = ["embed_tokens"] if self.tie_word_embeddings else ["embed_tokens", "lm_head"]
        return [
            *((f"{name}.weight", (self.vocab_size, hidden)) for name in outside),
            *(
                (f"layers.{at}.{name}.weight", each)
                for at in range(self.num_hidden_layers)
                for name, each in layer.items()
            ),
        ]


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
        shape = ModelShape.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise TrainingError(
            f"cannot read {path}: {describe(error)} (give a directory with config.json and *.safetensors)"
        ) from error
    tensors = [each for file in sorted(model.glob("*.safetensors")) for each in _tensors(file)] or shape.matrices()
    sizes = {name: math.prod(dimensions) for name, dimensions in tensors}
    trained = parameters = sum(sizes.values())
    if settings.method != "full":
        targets = [
            dimensions
            for name, dimensions in tensors
            if len(dimensions) == 2
            and name.removesuffix(".weight").rpartition(".")[2] in settings.target_modules
            and (settings.adapt_experts or ".experts." not in name)
        ]
        trained = settings.lora_rank * sum(map(sum, targets))
    outside = sum(size for name, size in sizes.items() if "layers." not in name)
    return ModelSize(shape, parameters, outside, trained)


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


def _tensors(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, from the header of a safetensors file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LARGEST_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
        return [(name, tuple(each["shape"])) for name, each in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"cannot read {path}: {describe(error)}") from error
