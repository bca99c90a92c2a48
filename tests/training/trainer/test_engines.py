"""What is declared of the engines is what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines_shown import ALGORITHMS, SHOWN
from pydantic import ValidationError

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.engines import LOCAL, engine_named
from openhands_rl_plugin.config.rl import TrainingSettings

TRAINING = Path(__file__).parents[1]
OTHERS = registry.names("training_engines")
ENGINES = {name: engine_named(name) for name in (LOCAL, *OTHERS)}
VALUES = {
    "method": "full",
    "lora_variant": "rslora",
    "adapt_experts": True,
    "router_aux_loss_coef": 0.1,
    "kl": "k3",
    "entropy_coefficient": 0.1,
    "max_tokens_per_micro_batch": 8192,
    "gradient_checkpointing": True,
    "sharding": "layers",
    "nproc_per_node": 2,
    "dtype": "float32",
    "lora_alpha": 16,
    "target_modules": ("q_proj",),
}
"""Of each key that some engine lacks or has some values of, one that it refuses."""


def test_every_engine_is_declared() -> None:
    assert set(SHOWN) == set(OTHERS)


@pytest.mark.parametrize(
    ("engine", "key"),
    [(name, key) for name in OTHERS for key in (*ENGINES[name].lacks, *(each.key for each in ENGINES[name].only))],
)
def test_what_an_engine_lacks_is_refused_in_one_line(engine: str, key: str) -> None:
    TrainingSettings(engine="local", algorithm="grpo", **{key: VALUES[key]})
    with pytest.raises(ValidationError, match=f'engine = "{engine}".*: set ') as refused:
        TrainingSettings(engine=engine, algorithm="grpo", **{key: VALUES[key]})
    assert "\n" not in refused.value.errors()[0]["msg"]


@pytest.mark.parametrize("engine", OTHERS)
def test_the_gradient_of_every_algorithm_of_an_engine_is_compared(engine: str) -> None:
    """The tests with the real packages are made of this, so the page may say "all"."""
    shown = SHOWN[engine]
    assert set(shown.gradients) == set(ALGORITHMS)
    for algorithm, given in shown.gradients.items():
        TrainingSettings(engine=engine, algorithm=algorithm, **given)
