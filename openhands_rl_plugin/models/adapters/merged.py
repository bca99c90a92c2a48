"""A version as a whole model, for programs that load no adapters: llama.cpp, Ollama, LM Studio."""

from __future__ import annotations

import shutil
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from openhands_rl_plugin.core.errors import ConfigError, describe
from openhands_rl_plugin.core.files import draft_folder
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE, read_adapter_config


def write_merged(adapter: Adapter, folder: Path, model: str = "") -> None:
    """Write the base model with the adapter's weights added, and its tokenizer, into the new ``folder``.

    ``model``: the base model's folder or name; by default the one that the adapter was trained on. Raises
    ``ConfigError`` for a folder that is there, and where the model or the adapter cannot be read.
    """
    if folder.exists():
        raise ConfigError(f"--merged {folder} is there already: name a new folder")
    source = Path(adapter.path)
    try:
        with draft_folder(folder.parent, ".new-") as fresh:
            if (source / CONFIG_FILE).is_file():
                name = model or read_adapter_config(source).base_model_name_or_path or adapter.base_model
                base = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
                PeftModel.from_pretrained(base, source).merge_and_unload().save_pretrained(fresh)
                AutoTokenizer.from_pretrained(name).save_pretrained(fresh)  # pyrefly: ignore[missing-attribute]
            else:  # it is a whole model
                shutil.copytree(source, fresh, dirs_exist_ok=True)
            fresh.rename(folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{adapter.name} cannot be merged: {describe(error)}; --model names its base model's folder"
        ) from error
