"""Estimates the memory of a training run from the model's files: nothing is loaded, torch is not needed.

Without weights files the shapes follow from ``config.json``, for the architectures in ``_KNOWN``.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe

_BYTES = {"auto": 4, "bfloat16": 2, "float32": 4}  # "auto" is one of the others, at most the larger
_ADAPTER_BYTES = 16
"""Per adapter parameter: weight, gradient and the two moments of AdamW, all float32."""

_GRADIENT_AND_MOMENTS = 12  # per weight: three float32 values
_FLOAT32_COPY = 4
_QUANTISED_BITS = 4.127
"""Bits per weight in NF4 with double quantisation (arXiv 2305.14314, section 3)."""

_LOGIT_ROWS, _LOGIT_COPIES = 128, 3
_BLOCK = 128
"""Queries whose attention scores exist at a time: ``attention_in_blocks.BLOCK``."""

_SCORES = 8
"""Bytes of a score beside its weight in the compute dtype: it and its exponential, both float32."""

_EXCHANGED = 4
"""Tensors of the queries' size that exist at a time around an all-to-all, beside those that a layer saves: one as it is
sent and as it is received, and another of which the memory is not free yet, when another thread still holds it."""

_GATE_GRADIENTS = 2
"""Intermediate-sized gradients that exist at a time in the backward pass of a gated layer."""
_LARGEST_HEADER = 100 * 1024 * 1024
_OUTSIDE_LAYERS = ("embed_tokens", "lm_head")
_KNOWN = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})


@dataclass(frozen=True)
class MemoryEstimate:
    """In bytes. ``activations``: what the largest micro-batch saves for the backward pass.

    ``scratch``: what the backward pass of a layer needs beside that: attention's, as a processor or a GPU computes it,
    whichever is more, or the gradients within a gated layer. ``optimiser``: in full fine-tuning, gradients, moments,
    and the float32 master copies of bfloat16 weights. ``host``: of the machine instead of the GPU, by
    ``activation_offloading``.
    """

    weights: int
    adapter: int
    activations: int
    scratch: int
    optimiser: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """The sum but for ``host``, without the memory of Python and torch themselves."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """The parts of ``total`` other than zero, by name."""
        return {name: size for name, size in vars(self).items() if size and name != "host"}


class ModelShape(BaseModel):
    """The shape of a Llama-like model, from ``config.json``."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    model_type: str = ""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

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
    """A model's shape and its numbers of parameters; ``trained`` are those that the optimiser changes."""

    shape: ModelShape
    parameters: int
    trained: int


_Tensor = tuple[str, tuple[int, ...]]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="ignore")
    shape: tuple[int, ...]


def model_size(model: Path, settings: TrainingSettings) -> ModelSize:
    """The size of the model in a directory, and of its trained part. Raises ``TrainingError``."""
    shape = _shape(model)
    tensors = [*_tensors(model, shape)]
    parameters = sum(math.prod(dimensions) for _, dimensions in tensors)
    whole = settings.method == "full"
    return ModelSize(shape, parameters, parameters if whole else _adapter_parameters(tensors, settings))


def estimate_memory(model: Path, settings: TrainingSettings, longest: int) -> MemoryEstimate:
    """The memory of training with these settings; ``longest``: tokens of the longest sequence, 0 for a micro-batch.

    Counts the tensors that the trainer saves for the backward pass of a Llama-like model; other architectures need
    about as much. Raises ``TrainingError`` when the model's files cannot be read.
    """
    shape, size = _shape(model), _BYTES[settings.dtype]
    tensors = [*_tensors(model, shape)]
    parameters = sum(math.prod(dimensions) for _, dimensions in tensors)
    rows, context = max(settings.max_tokens_per_micro_batch, longest), settings.context_parallel_size
    own = -(-rows // context)
    inputs, saved = (own * size * numbers for numbers in _numbers_a_token(shape, settings))
    host = inputs if settings.activation_offloading else 0
    activations = inputs + saved - host + _LOGIT_ROWS * shape.vocab_size * 4 * _LOGIT_COPIES
    gate = own * size * _GATE_GRADIENTS * shape.intermediate_size
    scratch = max(_attention_scratch(shape, longest or rows, size, context), gate)
    if settings.method == "full":
        each = _GRADIENT_AND_MOMENTS + (_FLOAT32_COPY if settings.dtype == "bfloat16" else 0)
        head = shape.vocab_size * shape.hidden_size * 4  # the gradient of the output layer while it is summed up
        return MemoryEstimate(parameters * size, 0, activations + head, scratch, parameters * each, host)
    weights = parameters * size
    if settings.method == "qlora":
        quantised = sum(math.prod(dimensions) for name, dimensions in tensors if _is_quantised(name, dimensions))
        weights = (parameters - quantised) * size + int(quantised * _QUANTISED_BITS / 8)
    adapter = _adapter_parameters(tensors, settings) * _ADAPTER_BYTES
    return MemoryEstimate(weights, adapter, activations, scratch, host=host)


def sources(model: Path, settings: TrainingSettings, longest: int) -> list[str]:
    """What the numbers of an adapter's estimate are made of, a line each. Raises as ``estimate_memory`` does."""
    shape, size = _shape(model), _BYTES[settings.dtype]
    tensors = [*_tensors(model, shape)]
    parameters = sum(math.prod(dimensions) for _, dimensions in tensors)
    rows = f"{max(settings.max_tokens_per_micro_batch, longest):,} tokens"
    inputs, saved = _numbers_a_token(shape, settings.model_copy(update={"context_parallel_size": 1}))
    what = "a layer saves while it is computed again" if inputs else "the layers save"
    where = "on the machine" if settings.activation_offloading else "part of the activations"
    kept = f"inputs of {shape.num_hidden_layers} layers, {where}: {rows} x {inputs:,} numbers x {size} bytes"
    gate = f"{_GATE_GRADIENTS} gradients within a gated layer ({rows} x {shape.intermediate_size:,} numbers)"
    return [
        f"weights: {parameters:,} parameters x {size} bytes; split: a share of the layers, two gathered layers, and "
        "all that is outside of the layers",
        f"adapter: {_adapter_parameters(tensors, settings):,} parameters x {_ADAPTER_BYTES} bytes: weight, gradient "
        "and AdamW's two moments in float32",
        f"activations: {rows} x {saved:,} numbers x {size} bytes that {what}; {_LOGIT_COPIES} x {_LOGIT_ROWS} rows of "
        f"{shape.vocab_size:,} logits in float32",
        *([kept] if inputs else []),
        f"scratch: {gate}, or if it is more, the scores of {_BLOCK} queries of {shape.num_attention_heads} heads over "
        "all keys (processor), or the gradients of queries, keys and values of all heads (GPU)",
        "a micro-batch shared by N: activations, inputs and scratch of a process are an N-th, but for the logits; its "
        f"attention has an N-th of the heads, and {_EXCHANGED} tensors of the queries' size around an all-to-all",
    ]


def check_fits(model: Path, settings: TrainingSettings, longest: int, free: int | None) -> None:
    """Raise ``TrainingError`` if the weights and the optimiser's state alone are more than the ``free`` bytes."""
    need = estimate_memory(model, settings, longest)
    least = need.weights + need.adapter + need.optimiser
    if free is not None and least > free:
        raise TrainingError(
            f'{model} does not fit: method = "{settings.method}" needs {least / 1e9:.2f} GB for weights, gradients and '
            f"optimiser (about {need.total / 1e9:.2f} GB in all), and {free / 1e9:.2f} GB are free: train an adapter, "
            'method = "lora", or split it among processes with sharding = "layers"'
        )


def estimate_share(model: Path, settings: TrainingSettings, longest: int, processes: int) -> MemoryEstimate:
    """``estimate_memory`` for each of several processes with ``sharding = "layers"``, after loading.

    ``weights``: the process's shard and the gathered weights, those of the current and the next layer, with their
    gradients if they are trained. Raises ``TrainingError`` when the model's files cannot be read.
    """
    alone, size = estimate_memory(model, settings, longest), _BYTES[settings.dtype]
    shape = _shape(model)
    sizes = [(name, math.prod(dimensions)) for name, dimensions in _tensors(model, shape)]
    layers = sum(count for name, count in sizes if ".layers." in name)
    outside = sum(count for name, count in sizes) - layers
    fetched = 2 * layers // shape.num_hidden_layers * size
    if settings.method == "full":
        kept = (layers + outside) * (_FLOAT32_COPY + _GRADIENT_AND_MOMENTS)
        fetched = 2 * (fetched + outside * size)
        return replace(alone, weights=fetched, optimiser=kept // processes)
    return replace(alone, weights=layers * size // processes + outside * size + fetched)


def _adapter_parameters(tensors: Sequence[_Tensor], settings: TrainingSettings) -> int:
    found = 0
    for name, dimensions in tensors:
        if ".experts." in name and not settings.adapt_experts:
            continue
        if len(dimensions) == 2 and name.removesuffix(".weight").rpartition(".")[2] in settings.target_modules:
            found += settings.lora_rank * sum(dimensions)
            # DoRA has a magnitude for every output as well.
            found += dimensions[0] if settings.lora_variant == "dora" else 0
    return found


def _is_quantised(name: str, dimensions: tuple[int, ...]) -> bool:
    return len(dimensions) == 2 and not any(part in name for part in _OUTSIDE_LAYERS)


def _numbers_a_token(shape: ModelShape, settings: TrainingSettings) -> tuple[int, int]:
    """Activations per token saved for the backward pass, in numbers of the compute dtype.

    First the layers' inputs that gradient checkpointing keeps, then all others.
    """
    hidden = shape.hidden_size
    keys = shape.keys * _copies(shape, settings.context_parallel_size)
    # Inputs and outputs of two normalisations; queries, keys, values and the attention's output; the gated layer.
    layer = 4 * hidden + 2 * shape.num_attention_heads * shape.width + 2 * keys + 3 * shape.intermediate_size
    if settings.method != "full":
        layer += settings.lora_rank * len(settings.target_modules)
    if settings.gradient_checkpointing:
        return shape.num_hidden_layers * hidden, layer
    return 0, shape.num_hidden_layers * layer


def _attention_scratch(shape: ModelShape, longest: int, size: int, context: int) -> int:
    """Of a processor or of a GPU, whichever is more.

    A processor has the scores of a block of queries over all keys, and the sequence's keys in float32 with the
    gradients of both. A GPU's kernels have no scores; flash's backward pass needs most: the gradient of the queries and
    its float32 sum, the gradients of keys and values, made for all heads first, and two float32 numbers a head.

    With context parallelism those of a part of the heads, and what is exchanged.
    """
    heads, keys = shape.num_attention_heads, shape.keys * _copies(shape, context)
    queries = heads * shape.width
    blocks = heads * _BLOCK * (_SCORES + size) + keys * (4 + 4 * size)
    kernels = queries * (4 + 3 * size) + keys * 2 * size + heads * 8
    sent = _EXCHANGED * queries * size if context > 1 else 0
    return longest * (max(blocks, kernels) + sent) // context


def can_share(shape: ModelShape, context: int) -> bool:
    """Whether so many ranks can have equal parts of the heads: ``ContextGroup.attention``."""
    return shape.num_attention_heads % math.lcm(shape.num_key_value_heads or 1, context) == 0


def _copies(shape: ModelShape, context: int) -> int:
    """How many ranks have the same head of keys: ``ContextGroup.attention``."""
    heads = shape.num_key_value_heads or shape.num_attention_heads
    return math.lcm(heads, context) // heads


def _shape(model: Path) -> ModelShape:
    path = model / "config.json"
    try:
        return ModelShape.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise TrainingError(
            f"cannot read {path}: {describe(error)} (give a directory with config.json and *.safetensors)"
        ) from error


def _tensors(model: Path, shape: ModelShape) -> Iterator[_Tensor]:
    """Names and shapes, from the headers of the safetensors files, or else from the configuration."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        if shape.model_type not in _KNOWN:
            raise TrainingError(
                f"{model} holds no *.safetensors files, and the shapes of {shape.model_type or 'its architecture'!r} "
                "are not known without them"
            )
        yield from _known_tensors(shape)
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


def _known_tensors(shape: ModelShape) -> Iterator[_Tensor]:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries = shape.num_attention_heads * shape.width
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for at in range(shape.num_hidden_layers):
        layer = f"model.layers.{at}"
        for name, outputs, inputs in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", shape.keys, hidden),
            ("self_attn.v_proj", shape.keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", wide, hidden),
            ("mlp.up_proj", wide, hidden),
            ("mlp.down_proj", hidden, wide),
        ):
            yield f"{layer}.{name}.weight", (outputs, inputs)
            if _has_bias(shape, name):
                yield f"{layer}.{name}.bias", (outputs,)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        if shape.model_type == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (shape.width,)
            yield f"{layer}.self_attn.k_norm.weight", (shape.width,)
    yield "model.norm.weight", (hidden,)
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def _has_bias(shape: ModelShape, name: str) -> bool:
    if name.startswith("mlp."):
        return shape.mlp_bias
    if shape.model_type == "qwen2":
        return not name.endswith("o_proj")
    return shape.attention_bias
