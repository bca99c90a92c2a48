"""The training engine ``tinker``: what it can do, and its trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.contrib.trainers.tinker import TinkerSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Adapter

if TYPE_CHECKING:
    from openhands_rl_plugin.training.trainer.trainer import Trainer

# The service answers with logprobs and nothing else, and chooses the layout of its batches itself.
_LACKS = (
    *("method", "lora_variant", "kl", "entropy_coefficient"),
    *("max_tokens_per_micro_batch", "sharding", "gradient_checkpointing", "dtype"),
)
_ATTENTION, _MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}


def check_settings(training: TrainingSettings) -> None:
    """Raise ``ConfigError`` for what the service has no counterpart for."""
    fields = TrainingSettings.model_fields
    if lacking := [name for name in _LACKS if getattr(training, name) != fields[name].default]:
        raise ConfigError(f'engine = "tinker" has no {", ".join(lacking)}: leave the default, or set engine = "local"')
    # The service's own; a request cannot change it (thinkingmachines.ai/blog/lora, SkyRL's ``api.py``).
    if training.lora_alpha != 32:
        raise ConfigError('engine = "tinker" trains with lora_alpha = 32 only: set that, or engine = "local"')
    if {*training.target_modules} not in (_ATTENTION, _MLP, _ATTENTION | _MLP):
        raise ConfigError('engine = "tinker" adapts all of attention, all of the MLP, or both: set target_modules')


def make_trainer(training: TrainingSettings, settings: RLSettings, base_model: str, adapter: Adapter | None) -> Trainer:
    """A trainer on the server of ``[rl.tinker]``. Raises ``ConfigError`` and ``TrainingError``."""
    from openhands_rl_plugin.contrib.trainers.tinker_trainer import TinkerTrainer

    return TinkerTrainer(training, settings.section("tinker", TinkerSettings), base_model, adapter=adapter)
