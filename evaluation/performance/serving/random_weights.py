"""Models and adapters with random weights, written to disk like trained ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tiny_model(path: Path, *, heads: int = 4) -> Path:
    """A two-layer Llama of width 64 whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*alphabet, "<end>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", chat_template=_TEMPLATE
    ).save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(alphabet) + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=4096,
        eos_token_id=len(alphabet),
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class AdapterWriter:
    """Writes LoRA adapters for the model in a directory, each with other weights, as PEFT would.

    ``size`` is the standard deviation of the upper half: how much an adapter changes what the model says.
    """

    def __init__(self, model: Path, folder: Path, *, rank: int = 16, size: float = 0.002) -> None:
        self._folder = folder
        self._rank = rank
        self._size = size
        self._base = str(model)
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).named_modules()
            self._linears = {
                name: (module.in_features, module.out_features)
                for name, module in shapes
                if isinstance(module, torch.nn.Linear) and name.endswith(_TARGETS)
            }

    def write(self, name: str) -> Path:
        """The directory of a new adapter; complete when this returns."""
        path = self._folder / name
        path.mkdir()
        weights: dict[str, torch.Tensor] = {}
        for module, (inputs, outputs) in self._linears.items():
            prefix = f"base_model.model.{module}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(self._rank, inputs) * 0.02
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, self._rank) * self._size
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._base,
            "r": self._rank,
            "lora_alpha": 2 * self._rank,
            "target_modules": list(_TARGETS),
            "bias": "none",
        }
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(weights, path / "adapter_model.safetensors")
        return path
