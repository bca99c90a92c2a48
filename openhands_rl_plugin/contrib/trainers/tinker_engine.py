"""The training engine ``tinker``: what it can do, and its trainer."""

from __future__ import annotations

from openhands_rl_plugin.config.engines import ATTENTION, MLP, OURS_ALONE, Engine, Only
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.contrib.trainers.tinker import TinkerSettings
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.training.learn import PolicyTrainer

LIMITS = Engine(
    # Versions whose protocol is known: older ones send JSON, which SkyRL 0.4 refuses.
    requires="tinker>=0.25,<0.39",
    title="the client of the Tinker API",
    # The service answers with logprobs and nothing else.
    lacks=(*OURS_ALONE, "gradient_checkpointing", "dtype"),
    only=(
        # The service's own; a request cannot change it (thinkingmachines.ai/blog/lora, SkyRL's ``api.py``).
        Only("lora_alpha", (32,), 'trains with lora_alpha = 32 only: set that, or engine = "local"'),
        Only(
            "target_modules",
            (ATTENTION, MLP, (*ATTENTION, *MLP)),
            f"adapts all of {', '.join(ATTENTION)}, all of {', '.join(MLP)}, or both: set target_modules to that, "
            'or engine = "local"',
        ),
    ),
    temperatures="1",
    here=False,
)


def make_trainer(
    training: TrainingSettings, settings: RLSettings, base_model: str, adapter: Adapter | None
) -> PolicyTrainer:
    """A trainer on the server of ``[rl.tinker]``. Raises ``ConfigError`` and ``TrainingError``."""
    from openhands_rl_plugin.contrib.trainers.tinker_trainer import TinkerTrainer

    return TinkerTrainer(training, settings.section("tinker", TinkerSettings), base_model, adapter=adapter)
