"""PEFT's ``adapter_config.json``: what the tensors of a LoRA adapter mean. No pattern of the file is compiled."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openhands_rl_plugin.core.errors import ConfigError, describe

CONFIG_FILE = "adapter_config.json"

_ON_PLAIN_BASE = (True, False, None, "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base weights as they are; every other one may subtract from them."""

_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "corda_config", "eva_config", "inference_mode", "loftq_config", "lora_dropout"),
        *("lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
        *("task_type", "unsloth_fixed", "exclude_modules", "layers_to_transform", "layers_pattern"),
    }
)
"""Options that say nothing of what the tensors mean; which layers have some, the tensors show."""


# vLLM computes prompt_logprobs without LoRA on these modules, so that no probe could verify them.
_UNVERIFIABLE = frozenset({"lm_head", "embed_tokens"})


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

    @property
    def variant(self) -> str:
        """The variant, as a value of ``lora_variant``."""
        return "dora" if self.use_dora else "rslora" if self.use_rslora else "lora"

    @property
    def layers(self) -> tuple[str, ...] | None:
        """The names of its target modules, sorted; ``None`` where they are not listed."""
        return tuple(sorted(self.target_modules)) if isinstance(self.target_modules, list) else None

    @property
    def scaling(self) -> float:
        """The factor of the low-rank terms. Raises ``OverflowError``."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)

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
        if found := sorted({name.rpartition(".")[2] for name in self.layers or ()} & _UNVERIFIABLE):
            return f"an adapter of {', '.join(found)} cannot be verified; leave it out of target_modules"
        options = {"use_dora": self.use_dora, **(self.model_extra or {})}
        found = sorted(name for name, value in options.items() if value and name not in _WITHOUT_EFFECT)
        what = f"{', '.join(found)[:200]} cannot be served; train a plain LoRA or rsLoRA adapter"
        return what if found else None


def read_adapter_config(directory: Path) -> AdapterConfig:
    """The file of the adapter in ``directory``. Raises ``ConfigError``."""
    path = directory / CONFIG_FILE
    try:
        return AdapterConfig.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} cannot be read: {describe(error)}") from error
