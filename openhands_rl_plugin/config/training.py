"""``[rl.training]``: the algorithm, its options, the adapter and its optimiser, as one frozen model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from openhands_rl_plugin.config.effects import IMITATING, without_effect
from openhands_rl_plugin.config.effects import AlgorithmName as AlgorithmName
from openhands_rl_plugin.config.fields import Settings
from openhands_rl_plugin.core.errors import ConfigError

# PEFT's options for weights beside the low-rank ones.
_UNSERVABLE = ("modules_to_save", "bias", "lora_bias", "use_dora", "trainable_token_indices")


def _provable_targets(value: tuple[str, ...]) -> tuple[str, ...]:
    if found := sorted({name.rpartition(".")[2] for name in value} & {"lm_head", "embed_tokens"}):
        raise ValueError(
            f"adapters of {', '.join(found)} are not trained: servers leave them out of the logprobs that prove them"
        )
    return value


class TrainingSettings(Settings):
    """``[rl.training]``: the algorithm, its options, the adapter and its optimiser.

    ``batch_size`` is in trajectories (of DPO: pairs) an optimiser step. A bound or an aggregation that is left to the
    algorithm (0, "auto") is that of its paper; see ``training/algorithms.py``.
    """

    algorithm: AlgorithmName = "reinforce++-baseline"
    method: Literal["lora", "qlora", "full"] = "lora"
    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    num_epochs: int = Field(default=3, ge=1)
    batch_size: int = Field(default=8, ge=1)
    batch_order: Literal["shuffled", "alike"] = "shuffled"
    max_grad_norm: float = Field(default=1.0, gt=0)
    lora_rank: int = Field(default=16, ge=1, le=1024)
    lora_alpha: int = Field(default=32, ge=1)
    lora_variant: Literal["lora", "rslora", "dora"] = "lora"
    target_modules: Annotated[tuple[str, ...], AfterValidator(_provable_targets)] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        strict=False,
    )
    clip_low: float = Field(default=0.0, ge=0, lt=1)
    clip_high: float = Field(default=0.0, ge=0)
    negative_scale: float = Field(default=1.0, ge=0, le=1)
    dual_clip: float = Field(default=0.0, ge=0)
    cispo_low: float = Field(default=0.2, gt=0, le=1)
    variance: Literal["biased", "unbiased"] = "biased"
    std_epsilon: float = Field(default=1e-6, ge=0)
    aggregation: Literal["auto", "token", "sequence", "fixed", "rollout"] = "auto"
    fixed_length: int = Field(default=0, ge=0)
    overlong: Literal["keep", "leave-out"] = "keep"
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    kl_coefficient: float = Field(default=0.001, ge=0)
    kl_in: Literal["loss", "reward"] = "loss"
    correction: Literal["none", "truncate", "mask"] = "none"
    correction_level: Literal["token", "sequence", "sequence-product"] = "token"
    correction_low: float = Field(default=0.5, ge=0, le=1)
    correction_high: float = Field(default=2.0, ge=1)
    step_rewards: Literal["episode", "environment", "search"] = "episode"
    discount: float = Field(default=1.0, gt=0, le=1)
    state_weight: float = Field(default=0.0, ge=0)
    tree: Literal["path", "branches"] = "path"
    tree_weight: float = Field(default=1.0, ge=0)
    tree_visits: int = Field(default=1, ge=1)
    imitate_above: float = 0.0
    keep_best: int = Field(default=1, ge=1)
    dpo_beta: float = Field(default=0.1, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_tokens_per_pass: int = Field(default=4096, ge=1)
    gradient_checkpointing: bool = False
    checkpoint_steps: int = Field(default=20, ge=0)
    sharding: Literal["auto", "none", "layers"] = "auto"
    seed: int = Field(default=0, ge=0)
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    tracker: Literal["none", "trackio", "wandb"] = "none"

    @model_validator(mode="before")
    @classmethod
    def _servable(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (found := [key for key in _UNSERVABLE if key in data]):
            raise ValueError(f"{', '.join(found)}: only LoRA's own weights are trained, as servers load nothing else")
        return data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError("dual_clip must be 0 (off) or greater than 1: it bounds the ratio where it is above 1")
        if found := [why for _, why in without_effect(self, self.algorithm)]:
            raise ValueError("; ".join(found))
        if self.discount < 1 and self.step_rewards == "episode" and not self.state_weight:
            raise ValueError(
                'discount needs rewards of steps: set step_rewards = "environment" or "search", or a state_weight, or '
                "leave 1"
            )
        if self.method == "full" and self.algorithm not in IMITATING:
            raise ValueError(
                'method = "full" fine-tunes: set algorithm = "sft" or "rejection-sampling", or train an adapter with '
                'method = "lora"'
            )
        if self.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError(
                'method = "qlora" needs bitsandbytes, which is not installed here: pip install bitsandbytes, or set '
                'method = "lora"'
            )
        if self.tracker != "none" and importlib.util.find_spec(self.tracker) is None:
            raise ValueError(
                f'tracker = "{self.tracker}" needs {self.tracker}, which is not installed here: pip install '
                f"'openhands_rl_plugin[{self.tracker}]', or set tracker = \"none\""
            )
        return self

    def as_fine_tuning(self) -> Self:
        """The same by ``algorithm = "sft"``, without what has no effect on it."""
        chosen = self.model_copy(update={"algorithm": "sft"})
        fields = type(self).model_fields
        return chosen.model_copy(update={name: fields[name].default for name, _ in without_effect(chosen, "sft")})

    def check_servable(self) -> None:
        """Raise ``ConfigError`` for what no server can load as an adapter while it runs."""
        if self.method == "full":
            raise ConfigError(
                '[rl.training] method = "full" makes a whole model, which is not loaded into a running server as an '
                'adapter: start a server with its directory, or set method = "lora"'
            )
        if self.lora_variant == "dora":
            raise ConfigError(
                '[rl.training] lora_variant = "dora": neither `openhands-rl serve` nor vLLM can serve it; train it '
                'without publishing, or use "lora" or "rslora"'
            )
