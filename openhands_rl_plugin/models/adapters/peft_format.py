"""The files of a PEFT adapter, and the options of its config that servers cannot apply."""

from __future__ import annotations

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

# Options of ``LoraConfig`` that change what the weights mean, beyond the plain low-rank term.
UNSUPPORTED_OPTIONS = (
    "modules_to_save",
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
)
