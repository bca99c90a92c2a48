"""The trainer of adapters that the settings ask for."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.settings import TrainingSettings
from openhands_rl_plugin.training.policy import TrainablePolicy
from openhands_rl_plugin.training.trainer import LoraTrainer
from openhands_rl_plugin.types import Adapter


def make_trainer(model: str | Path, settings: TrainingSettings, adapter: Adapter | None = None) -> LoraTrainer:
    """Trains LoRA on the weights as they are, or on quantised ones. Raises ``ConfigError`` and ``TrainingError``."""
    policy = TrainablePolicy
    if settings.method == "qlora":
        from openhands_rl_plugin.training.quantised import QuantisedPolicy as policy
    return LoraTrainer(model, settings, adapter=adapter, make_policy=policy)
