"""Tiny random models of many families, and what is known of each: the table of ``docs/families.md``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

How = Literal["packed", "one sequence", "refused"]

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION = _LAYERS[:4]


@dataclass(frozen=True)
class Family:
    """``targets``: of the adapter, where the default ones are refused. ``note``: for the page, what is special."""

    title: str
    model_type: str
    how: How
    changes: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = _LAYERS

    @property
    def servers(self) -> tuple[str, ...]:
        """The servers of an adapter with these targets."""
        vllm = () if self.model_type in ("mamba2", "rwkv", "bloom", "bert") else ("vLLM",)
        own = self.how == "packed" and self.model_type != "deepseek_v3"
        return (*vllm, "`openhands-rl serve`") if own else vllm


_LATENT: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_GLM: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1}

FAMILIES = (
    Family("Llama 2 and 3", "llama", "packed"),
    Family("Qwen2, Qwen2.5", "qwen2", "packed"),
    Family("Qwen3", "qwen3", "packed"),
    Family("Mistral (sliding window)", "mistral", "packed", {"sliding_window": 64}),
    Family("SmolLM3", "smollm3", "packed"),
    Family("Granite", "granite", "packed", {"logits_scaling": 4.0, "residual_multiplier": 0.5}),
    Family(
        "Gemma 3",
        "gemma3_text",
        "packed",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
    ),
    Family("Olmo 3", "olmo3", "packed", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}),
    Family("Phi-3", "phi3", "packed", targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    Family("Qwen2-MoE", "qwen2_moe", "packed", {**_MOE, "shared_expert_intermediate_size": 16}),
    Family("Qwen3-MoE", "qwen3_moe", "packed", _MOE, _ATTENTION),
    Family("Mixtral", "mixtral", "packed", {"num_local_experts": 4}, _ATTENTION),
    Family("MiniMax-M2", "minimax_m2", "packed", {"num_local_experts": 4, "num_experts_per_tok": 2}, _ATTENTION),
    Family("GLM-4-MoE", "glm4_moe", "packed", _GLM),
    Family(
        "DeepSeek-V3",
        "deepseek_v3",
        "packed",
        {**_GLM, **_LATENT, "head_dim": 4},
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *_LAYERS[4:]),
    ),
    Family(
        "GPT-OSS",
        "gpt_oss",
        "one sequence",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
        _ATTENTION,
    ),
    Family(
        "Gemma 2",
        "gemma2",
        "one sequence",
        {"sliding_window": 64, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    ),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        "one sequence",
        {**_MOE, **_DELTA, "shared_expert_intermediate_size": 16},
    ),
    Family("Qwen3.5", "qwen3_5_text", "one sequence", _DELTA),
    Family(
        "Qwen3.5-MoE", "qwen3_5_moe_text", "one sequence", {**_MOE, **_DELTA, "shared_expert_intermediate_size": 16}
    ),
    Family(
        "Nemotron-H",
        "nemotron_h",
        "one sequence",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
        (*_ATTENTION, "up_proj", "down_proj"),
    ),
    Family("Falcon-H1", "falcon_h1", "one sequence", {**_MAMBA, "lm_head_multiplier": 0.5}),
    Family(
        "Jamba",
        "jamba",
        "one sequence",
        {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "use_mamba_kernels": False,
        },
    ),
    Family(
        "LFM2 (convolutions)",
        "lfm2",
        "one sequence",
        {"layer_types": ["conv", "full_attention"]},
        ("q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3"),
    ),
    Family(
        "Granite 4 (hybrid)",
        "granitemoehybrid",
        "one sequence",
        {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
        },
        (*_ATTENTION, "input_linear", "output_linear"),
    ),
    Family(
        "Mamba-2",
        "mamba2",
        "one sequence",
        {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 16},
        ("in_proj", "out_proj"),
    ),
    Family("RWKV", "rwkv", "one sequence", {"attention_hidden_size": 32}, ("key", "value", "receptance", "output")),
    Family(
        "OPT (learnt positions)",
        "opt",
        "packed",
        {"num_key_value_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32},
        ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    ),
    Family("Bloom (ALiBi)", "bloom", "one sequence", {"n_head": 4, "n_layer": 2}, ("query_key_value", "dense")),
    Family("BERT as a decoder", "bert", "refused", {"is_decoder": True}, ("query", "value")),
    Family("Cohere (Command R)", "cohere", "packed", {"logit_scale": 0.25}),
)


def write_family(path: Path, family: Family, **changes: Any) -> Path:
    """A model directory without a tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **{**SHAPE, **family.changes, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Not the initial ones: some families begin with zero gates, decays and sinks, which hide what they do.
            if weight.ndim == 1 and "norm" not in name:
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(path)
    return path


_HEAD = """# Model families

What `[rl.training]` does with a family of models, shown by tests with tiny random models
(`tests/training/policies/test_families.py`): logprobs within 1e-4 nats of transformers' own, one sequence at a time,
and the cosine of the gradients above 0.9999. `train` says the same for your model.

- **packed**: sequences of a micro-batch are computed together, common prefixes once.
- **one sequence**: packed, one sequence would change another (layers with a recurrent state or a convolution,
  positions that depend on the longest sequence), or the attention has something that the packed one has not (sinks,
  score caps, ALiBi). A micro-batch is one sequence, prefixes are computed again: right, and slower.
- **refused**: the model's logprobs are not those of its last hidden states and its output layer. One line says so
  before anything is trained.

Your model is tested each time that it is loaded, by its logprobs and not by its name. So other families work in the
same way. Weights outside of the layers (heads for several tokens, a vision tower) are neither used nor trained.

The adapter's layers are the default `target_modules`, where no others are named. A mixture of experts is trained
with its attention and its shared layers: its experts stay as they are. The trainer routes anew: servers do not return
which experts they chose, and a difference is not corrected.

| family | `model_type` | trained | adapter served by | target_modules |
|---|---|---|---|---|
"""


def page() -> str:
    """The text of ``docs/families.md``."""
    return _HEAD + "".join(f"{_row(family)}\n" for family in FAMILIES)


def _row(family: Family) -> str:
    if family.how == "refused":
        return f"| {family.title} | `{family.model_type}` | refused | | |"
    own = "" if family.targets == _LAYERS else ", ".join(f"`{name}`" for name in family.targets)
    served = ", ".join(family.servers) or "none known"
    return f"| {family.title} | `{family.model_type}` | {family.how} | {served} | {own} |"
