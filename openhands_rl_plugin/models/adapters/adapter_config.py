"""PEFT's ``adapter_config.json``: what the tensors of a LoRA adapter mean.

The file is data: names are compared as PEFT compares them, and no pattern of the file is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openhands_rl_plugin.core.errors import ConfigError, describe

CONFIG_FILE = "adapter_config.json"

_ON_PLAIN_BASE = (True, False, None, "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base weights as they are; every other one may subtract from them."""

_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "corda_config", "eva_config", "inference_mode", "loftq_config", "lora_dropout"),
        *("lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
        *("task_type", "unsloth_fixed"),
    }
)
"""Options that say nothing of what the tensors mean."""

_NAME = re.compile(r"\^?[\w.-]+", re.ASCII)


class AdapterConfig(BaseModel):
    """The options with an effect on what is computed. All others are kept, too: a true one is refused."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    peft_type: str = ""
    base_model_name_or_path: str | None = None
    r: int = Field(default=8, ge=1)
    lora_alpha: int | float = 8
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] | None = None
    alpha_pattern: dict[str, int | float] | None = None

    @property
    def variant(self) -> str:
        """The variant, as a value of ``lora_variant``."""
        return "dora" if self.use_dora else "rslora" if self.use_rslora else "lora"

    @property
    def layers(self) -> tuple[str, ...] | None:
        """The names of its target modules, sorted; ``None`` where they are not listed."""
        return tuple(sorted(self.target_modules)) if isinstance(self.target_modules, list) else None

    def refusal(self) -> str | None:
        """Why no server can compute what PEFT computes; ``None`` where servers can."""
        if self.peft_type != "LORA":
            return f"its {CONFIG_FILE} is not that of a LoRA adapter"
        if self.bias != "none":
            return f"bias = {self.bias!r} cannot be served; train with bias = 'none'"
        if self.init_lora_weights not in _ON_PLAIN_BASE:
            return (
                f"init_lora_weights = {self.init_lora_weights!r:.40} changed the base weights; save it with PEFT's "
                "path_initial_model_for_weight_conversion, which makes it a plain adapter"
            )
        options = {"use_dora": self.use_dora, **(self.model_extra or {})}
        if found := sorted(name for name, value in options.items() if value and name not in _WITHOUT_EFFECT):
            return f"{', '.join(found)[:200]} cannot be served; train a plain LoRA or rsLoRA adapter"
        patterns = [*(self.rank_pattern or ()), *(self.alpha_pattern or ()), *_listed(self.layers_pattern)]
        if not isinstance(self.target_modules, list) and self.target_modules != "all-linear":
            patterns.append(str(self.target_modules))
        elif isinstance(self.exclude_modules, str) and self.exclude_modules:
            patterns.append(self.exclude_modules)
        else:
            patterns = [each for each in patterns if not _NAME.fullmatch(each)]
        return f"{patterns[-1]!r:.100} is not the name of a layer; list the names" if patterns else None

    def adapts(self, module: str) -> bool:
        """Whether PEFT adapts the linear layer ``module``, a dotted name."""
        if self.target_modules == "all-linear":
            return not _is_among(module, ["lm_head"])
        if _is_among(module, _listed(self.exclude_modules)) or not _is_among(module, _listed(self.target_modules)):
            return False
        chosen = [self.layers_to_transform] if isinstance(self.layers_to_transform, int) else self.layers_to_transform
        return not chosen or _layer_index(module, _listed(self.layers_pattern)) in chosen

    def rank(self, module: str) -> int:
        """The rank of ``module``."""
        return _first(self.rank_pattern or {}, module, self.r)

    def scaling(self, module: str) -> float:
        """The factor of the low-rank term of ``module``. Raises ``OverflowError``."""
        alpha, rank = _first(self.alpha_pattern or {}, module, self.lora_alpha), self.rank(module)
        return alpha / rank**0.5 if self.use_rslora else alpha / rank


def read_adapter_config(directory: Path) -> AdapterConfig:
    """The file of the adapter in ``directory``. Raises ``ConfigError``."""
    path = directory / CONFIG_FILE
    try:
        return AdapterConfig.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} cannot be read: {describe(error)}") from error


def _listed(names: Sequence[str] | str | None) -> Sequence[str]:
    return [names] if isinstance(names, str) and names else list(names or ())


def _is_among(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first[V](pattern: Mapping[str, V], module: str, default: V) -> V:
    """The value of the first name that matches as in PEFT, ``re.match(rf"(.*\\.)?({name})$", module)``."""
    for key, value in pattern.items():
        name = key.removeprefix("^")
        begin = len(module) - len(name)
        whole = begin == 0 or (begin > 0 and name == key and module[begin - 1] == ".")
        if whole and all(one in (".", other) for one, other in zip(name, module[begin:], strict=True)):
            return value
    return default


def _layer_index(module: str, parents: Sequence[str]) -> int | None:
    """The number of the layer behind one of ``parents`` (default: behind any name but the first)."""
    parts = module.split(".")
    for parent in parents or [None]:
        for at in range(1 if parent else 2, len(parts) - 1):
            if parts[at].isdecimal() and parent in (None, parts[at - 1]):
                return int(parts[at])
    return None
