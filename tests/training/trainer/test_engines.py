"""What is declared of the engines is what they do."""

from __future__ import annotations

import pytest
from engines_shown import ALGORITHMS, SHOWN

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.contrib.trainers.tinker_engine import check_settings
from openhands_rl_plugin.core.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kl": "k3", "lora_variant": "rslora"}, "has no lora_variant, kl: leave"),
        ({"lora_alpha": 16}, "lora_alpha = 32 only"),
        ({"target_modules": ("q_proj",)}, "adapts all of attention"),
    ],
)
def test_what_tinker_lacks_is_refused_in_one_line(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_settings(TrainingSettings.model_validate({"engine": "tinker", "algorithm": "grpo", **changes}))


def test_the_gradient_of_every_algorithm_of_an_engine_is_compared() -> None:
    """The tests with the real packages are made of this, so the page may say "all"."""
    assert set(SHOWN) == set(registry.names("training_engines"))
    for engine, shown in SHOWN.items():
        assert {*shown.gradients, "opd", "opsd"} == set(ALGORITHMS)
        for algorithm, given in shown.gradients.items():
            check_settings(TrainingSettings.model_validate({"engine": engine, "algorithm": algorithm, **given}))
