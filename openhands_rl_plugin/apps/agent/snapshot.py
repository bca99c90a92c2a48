"""A model object saved to disk, as the fixed base model of adapters.

An adapter is valid only with the exact weights it was trained on, and a model object can change at any time. So the
object is saved once, and served and trained from there; the object itself is never modified.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol, runtime_checkable

from openhands_rl_plugin.core.errors import ConfigError, StorageError, describe
from openhands_rl_plugin.core.files import draft_folder

_PREFIX = "base-"
_DIGEST_LENGTH = 16


@runtime_checkable
class Savable(Protocol):
    """What Hugging Face models and tokenizers have in common."""

    def save_pretrained(self, save_directory: str, /) -> object:
        """Write into a directory in Hugging Face's form (models: ``config.json`` and safetensors)."""
        ...


def snapshot(model: Savable, tokenizer: Savable, folder: Path) -> Path:
    """Write model and tokenizer to ``folder/base-<digest of the files>`` and return that directory.

    Equal weights give the same directory, which is written once. Raises ``ConfigError`` for an object that is not a
    whole model, ``StorageError`` when there is no room.
    """
    try:
        with draft_folder(folder, f".{_PREFIX}") as partial:
            model.save_pretrained(str(partial))
            _check_whole(model, partial)
            tokenizer.save_pretrained(str(partial))
            target = folder / f"{_PREFIX}{_digest(partial)[:_DIGEST_LENGTH]}"
            if not target.exists():
                partial.rename(target)
    except OSError as error:
        raise StorageError(
            f"the model cannot be written to {folder}: {describe(error)}; free some space or set [rl.serving] "
            "adapters_path"
        ) from error
    return target.resolve()


def _check_whole(model: Savable, directory: Path) -> None:
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"{type(model).__name__} does not save itself as a whole model (config.json and *.safetensors): pass a "
            "transformers model; merge the adapter of a PEFT model first: model.merge_and_unload()"
        )


def _digest(directory: Path) -> str:
    """sha256 over the names and contents of the files."""
    digest = hashlib.sha256()
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(directory).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
