"""The models' own chat templates, from where they are installed.

They are other people's files, so none of them stands here: they come out of ``trl``, or of the folder that
``OPENHANDS_RL_CHAT_TEMPLATES`` names (llama.cpp's ``models/templates``).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HOW_TO_GET = "install trl, or let OPENHANDS_RL_CHAT_TEMPLATES name a folder with llama.cpp's models/templates"

FILES = {
    "gemma3": ("gemma3.jinja",),
    "llama3.1": ("llama3_1.jinja",),
    "qwen2.5": ("qwen2_5.jinja", "Qwen-Qwen2.5-7B-Instruct.jinja"),
    "qwen3": ("qwen3.jinja",),
}

SPECIAL = [
    "<|begin_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<tool_call>",
    "</tool_call>",
    "<start_of_turn>",
    "<end_of_turn>",
]

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 cuts text into words before its merges; Qwen's differs in digits only."""


def official_template(family: str) -> str | None:
    """The Jinja text of a family, or ``None`` where it is not installed."""
    folders = [os.environ.get("OPENHANDS_RL_CHAT_TEMPLATES")]
    if (trl := importlib.util.find_spec("trl")) is not None and trl.submodule_search_locations:
        folders.append(f"{trl.submodule_search_locations[0]}/chat_templates")
    found = (Path(folder, name) for folder in folders if folder for name in FILES[family])
    return next((path.read_text(encoding="utf-8") for path in found if path.exists()), None)


def small_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose special tokens are those of the families, and which splits as theirs do."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([chat_template, Path(__file__).read_text(encoding="utf-8")] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL,
        chat_template=chat_template,
    )
