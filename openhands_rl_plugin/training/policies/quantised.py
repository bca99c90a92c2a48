"""QLoRA: an adapter on a base with linear layers in four bits (Dettmers et al. 2023, arXiv 2305.14314)."""

from __future__ import annotations

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PreTrainedModel

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy, adapter_config
from openhands_rl_plugin.training.policies.packed_model import load_model


class QuantisedPolicy(TrainablePolicy):
    """A LoRA adapter on a base in bitsandbytes' NF4 with double quantisation. Raises ``TrainingError``."""

    @property
    def probe_tolerance(self) -> float:
        """Wider: a server's base is not quantised, which moves logprobs by a tenth of a nat and more."""
        return 0.5

    def _open(self) -> PreTrainedModel:
        quantised = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.dtype,
        )
        try:
            return load_model(
                self.model_path,
                self.dtype,
                self.device,
                quantization_config=quantised,
                device_map={"": torch.device(self.device)},
            )
        except (RuntimeError, AttributeError) as error:
            raise TrainingError(
                f'{self.model_path} cannot be quantised here: {describe(error)}; set method = "lora"'
            ) from error

    def _config(self, settings: TrainingSettings) -> LoraConfig:
        # PEFT has its own layers for those of bitsandbytes.
        return adapter_config(settings, self.model_path, custom_layers=False)
