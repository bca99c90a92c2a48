"""Whether a model can be loaded, seen before torch is imported: a folder, or a name on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import httpx

from openhands_rl_plugin.core.errors import ConfigError

_SECONDS = 5.0
_FOLDER = "give the folder of a Hugging Face model, with config.json, *.safetensors and a tokenizer"


def check_model(name: str) -> None:
    """Raise ``ConfigError`` for a path that is no model's folder. Whether a name is on the hub, loading it shows.

    Where the hub does not answer within five seconds, only its cache is read.
    """
    place = Path(name).expanduser()
    if place.exists() or name.startswith((".", "~", "/")) or name.count("/") > 1 or name.endswith("/"):
        check_model_folder(place)
        return
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        httpx.head(constants.ENDPOINT, timeout=_SECONDS)
    except httpx.HTTPError:  # without this, transformers asks for every file again and again
        constants.HF_HUB_OFFLINE = True


def check_model_folder(folder: Path) -> None:
    """Raise ``ConfigError`` for a folder without ``config.json``, and for what is no folder."""
    if not folder.exists():
        raise ConfigError(f"{folder}: there is no such folder; {_FOLDER}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: there is no config.json in it, so no model; {_FOLDER}")
