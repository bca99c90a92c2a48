"""What ``[rl.training] engine = "trl"`` can train: TRL's GRPO loss on an adapter, on rows of ours."""

from __future__ import annotations

from pydantic import BaseModel

from openhands_rl_plugin.config.engines import refused_keys

_WITHOUT_EFFECT = (
    "method",
    "lora_variant",
    "adapt_experts",
    "router_aux_loss_coef",
    "kl",
    "entropy_coefficient",
    "max_tokens_per_micro_batch",
    "sharding",
)
"""Keys of ``[rl.training]`` that are not passed on: TRL's own terms are not weighted as a batch of ours is."""


def refused_by_trl(training: BaseModel) -> str:
    """What of ``[rl.training]`` TRL's trainer cannot do, and what to set; empty where it can do all."""
    if found := refused_keys("trl", training, _WITHOUT_EFFECT):
        return found
    values = training.model_dump()
    if values["algorithm"] == "dpo":
        return 'engine = "trl" has no algorithm = "dpo": choose one of the others, or set engine = "local"'
    if values["algorithm"] == "cispo" and values["cispo_low"] != 1:
        return 'engine = "trl" clips the weights of algorithm = "cispo" from above only: set cispo_low = 1.0'
    return ""
