"""The trainer of adapters that the settings ask for."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.trainer.trainer import LoraTrainer


def make_trainer(model: str | Path, settings: TrainingSettings, adapter: Adapter | None = None) -> LoraTrainer:
    """Trains LoRA on the weights as they are, or on quantised ones. Raises ``ConfigError`` and ``TrainingError``."""
    policy = TrainablePolicy
    if settings.method == "qlora":
        from openhands_rl_plugin.training.policies.quantised import QuantisedPolicy as policy
    return LoraTrainer(model, settings, adapter=adapter, make_policy=policy)
