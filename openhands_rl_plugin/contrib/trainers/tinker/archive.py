"""An adapter as the service exports it, in PEFT's format: a tar file, which is read and never unpacked as it is."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.models.adapters.peft_format import CONFIG_FILE, WEIGHTS_FILE

_LARGEST = 16 << 30
"""Bytes of one file: many times the largest adapter."""


def write_adapter(archive: bytes, directory: Path, *, base_model: str) -> None:
    """Write the two files of the adapter into ``directory``. Raises ``TrainingError`` for an archive without them."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                file = tar.extractfile(member) if member.isfile() and member.size <= _LARGEST else None
                if name in (CONFIG_FILE, WEIGHTS_FILE) and file is not None:
                    found[name] = file.read()
        config, weights = json.loads(found[CONFIG_FILE]), load(found[WEIGHTS_FILE])
    except (tarfile.TarError, EOFError, OSError, KeyError, ValueError, SafetensorError) as error:
        raise TrainingError(f"what the Tinker service exported is no adapter: {describe(error)}") from error
    modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in weights})
    # SkyRL leaves the layers open, and names the base model by a folder of its own machine.
    config |= {"target_modules": config.get("target_modules") or modules, "base_model_name_or_path": base_model}
    config |= {"task_type": config.get("task_type") or "CAUSAL_LM"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=1), encoding="utf-8")
    (directory / WEIGHTS_FILE).write_bytes(found[WEIGHTS_FILE])
