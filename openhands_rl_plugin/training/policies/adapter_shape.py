"""The LoRA rank, scale and layers of an adapter: with others, its weights would be another policy."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.store import CONFIG_FILE


class AdapterShape(BaseModel):
    """The part of PEFT's ``adapter_config.json`` that the settings determine."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    r: int
    lora_alpha: int | float
    use_rslora: bool = False
    use_dora: bool = False
    target_modules: frozenset[str] | str | None = None

    @property
    def variant(self) -> str:
        """The variant, as a value of ``lora_variant``."""
        return "dora" if self.use_dora else "rslora" if self.use_rslora else "lora"

    @property
    def layers(self) -> tuple[str, ...] | None:
        """The names of its target modules; ``None`` where they are given as a pattern."""
        return tuple(sorted(self.target_modules)) if isinstance(self.target_modules, frozenset) else None


def read_shape(directory: Path) -> AdapterShape:
    """The shape of the adapter in a directory. Raises ``TrainingError``."""
    path = directory / CONFIG_FILE
    try:
        return AdapterShape.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise TrainingError(f"{path} cannot be read: {describe(error)}") from error


def check_start(adapter: Adapter, settings: TrainingSettings) -> None:
    """Raise ``TrainingError`` unless ``adapter`` has the rank, the scale and the layers of ``settings``.

    Another scale would change the policy before its first step, and no tensor shape would show it. A version that is a
    whole model is continued with ``method = "full"`` only, and an adapter without.
    """
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
    made = read_shape(Path(adapter.path))
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
