"""The trainer that ``[rl.training] engine`` names."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.config.training import LOCAL
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.training.launched.trainer import LaunchedTrainer
from openhands_rl_plugin.training.learn import PolicyTrainer
from openhands_rl_plugin.training.trainer.local_trainer import FullTrainer, LoraTrainer


def make_trainer(
    model: Path, training: TrainingSettings, settings: RLSettings, base_model: str, adapter: Adapter | None
) -> PolicyTrainer:
    """A trainer by ``training``, which ``adapter`` starts, or the base model.

    ``model``: the folder of its weights, for an engine of this machine; ``base_model``: its name at the server of the
    policy. ``settings`` say where another engine is. Other packages add engines by the entry points
    ``openhands_rl_plugin.training_engines``: modules with ``make_trainer(training, settings, base_model, adapter)`` and
    ``check_settings(training)``.
    Raises ``ConfigError`` and ``TrainingError``.
    """
    training.check_engine()
    if training.engine != LOCAL:
        return registry.find("training_engines", training.engine).make_trainer(training, settings, base_model, adapter)
    if training.nproc_per_node > 1:
        return LaunchedTrainer(model, training, adapter=adapter)
    return (FullTrainer if training.method == "full" else LoraTrainer)(model, training, adapter=adapter)
