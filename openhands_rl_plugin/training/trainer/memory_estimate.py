"""Estimates the memory of training from a model's ``config.json`` and the headers of its weights, without torch."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe


class ModelSize(NamedTuple):
    """A model's ``config.json`` with the widths that it leaves out, and numbers of parameters: all, those outside of
    its layers, and those that are trained."""

    shape: dict[str, Any]
    parameters: int
    outside: int
    trained: int


class MemoryEstimate(NamedTuple):
    """In bytes, without the memory of Python and torch. ``weights``: with gradients and the optimiser's state."""

    weights: int
    total: int


def model_size(model: Path, settings: TrainingSettings) -> ModelSize:
    """The size of the model in a directory, and of its trained part. Raises ``TrainingError``.

    A ``config.json`` without weights beside it is taken for that of a model like Llama.
    """
    try:
        read = json.loads((model / "config.json").read_text(encoding="utf-8"))
        config = {name: each for name, each in (read.get("text_config") or read).items() if each is not None}
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        shape = {"head_dim": hidden // heads, "num_key_value_heads": heads, "intermediate_size": 4 * hidden, **config}
        tensors: dict[str, list[int]] = {}
        for file in model.glob("model*.safetensors"):
            with safe_open(file, "np") as weights:
                tensors |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        tensors = tensors or _like_llama(shape)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError, SafetensorError) as error:
        raise TrainingError(f"cannot read {model}/config.json: {describe(error)} (no folder of a model?)") from error
    endings = tuple(f".{each}.weight" for each in settings.target_modules)
    adapted = [tensors[n] for n in tensors if n.endswith(endings) and (settings.adapt_experts or ".experts." not in n)]
    # A low-rank term has two matrices, and DoRA's a magnitude for each output.
    trained = sum(settings.lora_rank * sum(dims) + dims[0] * (settings.lora_variant == "dora") for dims in adapted)
    every = sum(map(prod, tensors.values()))
    outside = sum(prod(dims) for name, dims in tensors.items() if "layers." not in name)
    return ModelSize(shape, every, outside, every if settings.method == "full" else trained)


def _like_llama(shape: dict[str, Any]) -> dict[str, list[int]]:
    """The shapes of a model's tensors; those of its norms and biases, and those outside of its layers, are together."""
    hidden, wide, width, kind = (shape[name] for name in ("hidden_size", "intermediate_size", "head_dim", "model_type"))
    heads, keys = width * shape["num_attention_heads"], width * shape["num_key_value_heads"]
    layer = {"q_proj": [heads, hidden], "k_proj": [keys, hidden], "v_proj": [keys, hidden], "o_proj": [hidden, heads]}
    layer |= {"gate_proj": [wide, hidden], "up_proj": [wide, hidden], "down_proj": [hidden, wide]}
    biased = [*layer][: 3 if kind == "qwen2" else 4 * shape.get("attention_bias", 0)]
    biased += [*layer][4:] if shape.get("mlp_bias") else []
    layer["rest"] = [sum(layer[name][0] for name in biased) + 2 * hidden + 2 * width * kind.startswith("qwen3")]
    layers = {f"layers.{at}.{n}.weight": dims for at in range(shape["num_hidden_layers"]) for n, dims in layer.items()}
    return {"ends": [shape["vocab_size"] * (1 if shape.get("tie_word_embeddings") else 2) + 1, hidden], **layers}


def estimate_memory(model: Path, settings: TrainingSettings, longest: int, processes: int = 1) -> MemoryEstimate:
    """The memory of training with these settings; ``longest``: tokens of the longest sequence, 0 for a micro-batch.

    ``processes``: that of each of so many with ``sharding = "layers"``, after loading. The activations are those of a
    Llama-like model; other architectures need about as much. Raises ``TrainingError`` when the model's files cannot be
    read.
    """
    shape, parameters, outside, trained = model_size(model, settings)
    hidden, wide, count = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    width = 2 if settings.dtype == "bfloat16" else 4  # of "auto" at most
    gathered = 2 * (parameters - outside) // count * width if processes > 1 else 0
    # A trained parameter has weight, gradient and two moments of AdamW in float32; where all are trained, there are
    # rounded copies of bfloat16 weights, or of the gathered ones. NF4 has 4.127 bits a weight (arXiv 2305.14314).
    whole = parameters * (16 + (2 if width == 2 and processes == 1 else 0)) // processes + 2 * gathered
    base = (parameters - outside) * (4.127 / 8 if settings.method == "qlora" else width)
    weights = whole if settings.method == "full" else int(base) // processes + outside * width + gathered + 16 * trained
    rows = max(settings.max_tokens_per_micro_batch, longest)
    # Inputs and outputs of two normalisations; the attention's output; the gated layer. Queries, keys, values and what
    # is attended to are float32 on a processor.
    heads = shape["num_attention_heads"]
    attention = 2 * (heads + shape["num_key_value_heads"]) * shape["head_dim"]
    ranks = settings.lora_rank * len(settings.target_modules) if trained < parameters else 0
    saved = width * (4 * hidden + heads * shape["head_dim"] + 3 * wide + ranks) + 4 * attention
    kept = saved + count * hidden * width if settings.gradient_checkpointing else saved * count
    # Two copies of the gated layer, and three of the float32 logits of 128 rows, exist at a time.
    scratch = rows * width * 2 * wide + shape["vocab_size"] * 3 * 128 * 4
    return MemoryEstimate(weights, weights + rows * kept + scratch)
