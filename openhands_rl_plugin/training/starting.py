"""Whether training can go on from an adapter: its weights mean something else by another rank or scale."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from openhands_rl_plugin.errors import TrainingError, describe
from openhands_rl_plugin.settings import TrainingSettings
from openhands_rl_plugin.types import Adapter

CONFIG_FILE = "adapter_config.json"


class _PeftConfig(BaseModel):
    """What PEFT notes beside an adapter's weights, as far as settings decide it."""

    model_config = ConfigDict(extra="ignore")

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    target_modules: frozenset[str] | str | None = None

    @property
    def variant(self) -> str:
        return "dora" if self.use_dora else "rslora" if self.use_rslora else "lora"


def check_start(adapter: Adapter, settings: TrainingSettings) -> None:
    """Raise ``TrainingError`` unless ``adapter`` has the rank, the scale and the layers of ``settings``.

    Another scale would change the policy before its first step, and no shape would tell.
    """
    path = Path(adapter.path) / CONFIG_FILE
    try:
        made = _PeftConfig.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise TrainingError(f"adapter {adapter.name}: cannot read {path}: {describe(error)}") from error
    pairs: dict[str, tuple[object, object]] = {
        "lora_rank": (made.r, settings.lora_rank),
        "lora_alpha": (made.lora_alpha, settings.lora_alpha),
        "lora_variant": (made.variant, settings.lora_variant),
    }
    if isinstance(made.target_modules, frozenset):
        pairs["target_modules"] = (sorted(made.target_modules), sorted(settings.target_modules))
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise TrainingError(
                f"{adapter.name} was made with {name} = {_toml(found)}, and [rl.training] has {_toml(wanted)}: set "
                f"{name} = {_toml(found)} to go on from it, or start from base"
            )


def _toml(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value).replace("'", '"')
