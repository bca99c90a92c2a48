"""Whether a model can be loaded, said before torch is imported: a folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from openhands_rl_plugin.core.errors import ConfigError

_SECONDS = 5.0
_FOLDER = "give the folder of a Hugging Face model, with config.json, *.safetensors and a tokenizer"


def check_model(name: str) -> None:
    """Raise ``ConfigError`` for a model that is neither a folder with ``config.json`` nor to be had from the hub.

    The hub is asked only for what is not in its cache, once, and for five seconds.
    """
    place = Path(name).expanduser()
    if place.exists() or name.startswith((".", "~", "/")) or name.count("/") > 1 or name.endswith("/"):
        check_model_folder(place)
    else:
        _check_hub(name)


def check_model_folder(folder: Path) -> None:
    """Raise ``ConfigError`` for a folder without ``config.json``, and for what is no folder."""
    if not folder.exists():
        raise ConfigError(f"{folder}: there is no such folder; {_FOLDER}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: there is no config.json in it, so no model; {_FOLDER}")


def _check_hub(name: str) -> None:
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, get_token

    try:
        known = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ConfigError(f"{name}: there is no such folder, and a model of the hub is NAME or OWNER/NAME") from error
    if isinstance(known, str):
        # What is missing is in the cache or nowhere: without this, transformers asks for every file again and again.
        if not _answers(constants.ENDPOINT):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        return
    absent = f"{name}: there is no such folder, it is not in the hub's cache"
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{absent}, and HF_HUB_OFFLINE is set: unset it, or {_FOLDER}")
    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{constants.ENDPOINT}/api/models/{name}", headers=headers, timeout=_SECONDS)
    except httpx.HTTPError as error:
        raise ConfigError(f"{absent}, and {constants.ENDPOINT} does not answer: connect to it, or {_FOLDER}") from error
    if answer.status_code in (401, 403, 404):
        raise ConfigError(
            f"{name}: there is no such folder and no such model on {constants.ENDPOINT} (a gated or private one needs "
            f"HF_TOKEN); correct the name, or {_FOLDER}"
        )


def _answers(url: str) -> bool:
    try:
        httpx.head(url, timeout=_SECONDS)
    except httpx.HTTPError:
        return False
    return True
