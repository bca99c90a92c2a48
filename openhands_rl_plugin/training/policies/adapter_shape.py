"""The LoRA rank, scale and layers of an adapter: with others, its weights would be another policy."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE, read_adapter_config


def check_start(adapter: Adapter | None, settings: TrainingSettings) -> None:
    """Raise an error unless ``adapter``, if there is one, has the rank, the scale and the layers of ``settings``.

    Another scale would change the policy before its first step, and no tensor shape would show it. A version that is a
    whole model is continued with ``method = "full"`` only, and an adapter without. Raises ``TrainingError``, or
    ``ConfigError`` for an adapter whose configuration cannot be read.
    """
    if adapter is None:
        return
    path = Path(adapter.path)
    whole = not (path / CONFIG_FILE).exists() and (path / "config.json").exists()
    if whole != (settings.method == "full"):
        kind = "a whole model" if whole else "an adapter"
        raise TrainingError(
            f'{adapter.name} is {kind}, and [rl.training] method = "{settings.method}" does not continue it: set '
            "another method, start from base, or choose another name for the new one ([rl.serving] adapter)"
        )
    if whole:
        return
    made = read_adapter_config(path)
    pairs: dict[str, tuple[object, object]] = {
        "lora_rank": (made.r, settings.lora_rank),
        "lora_alpha": (made.lora_alpha, settings.lora_alpha),
        "lora_variant": (made.variant, settings.lora_variant),
    }
    if made.layers is not None:
        pairs["target_modules"] = (list(made.layers), sorted(settings.target_modules))
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise TrainingError(
                f"{adapter.name} was made with {name} = {_toml(found)}, and [rl.training] has {_toml(wanted)}: set "
                f"{name} = {_toml(found)} to continue from it, or start from base"
            )


def _toml(value: object) -> str:
    return repr(value).replace("'", '"')
