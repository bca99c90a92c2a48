"""Tiny random models with a tokenizer and LoRA adapters for them, written to disk like real ones."""

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "user assistant system tool search click buy now",
    "one two three four five six seven eight nine ten",
]
_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large enough that the random model prefers some tokens: greedy choices are then stable.
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_tokenizer(
    path: Path, chat_template: str | None = CHAT_TEMPLATE, texts: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """``texts``: what it learns to write shortly, beside a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1900 if texts else 400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([*_TEXT, *texts], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=chat_template,
    )
    fast.save_pretrained(path)
    return fast


def write_model(path: Path, *, model_type: str = "llama", seed: int = 0, **changes: object) -> Path:
    """A model directory; `changes` override the shape (`hidden_size`, ...)."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    write_tokenizer(path)
    return path


def write_adapter(path: Path, model: Path, *, seed: int, rank: int = 4, **options: object) -> Path:
    """A LoRA directory whose weights are random in both halves, so that it changes every answer."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(
        **{"r": rank, "lora_alpha": 2 * rank, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **options}
    )
    wrapped = get_peft_model(base, config)
    for name, weight in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    wrapped.save_pretrained(path)
    return path
