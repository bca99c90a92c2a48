"""What is declared of the engines is what they do, and what their table tells: see ``engines_table``."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest
from engines_table import ALGORITHMS, SHOWN, TOLD, table
from made_samples import EXACT, learn, make_samples, segmented
from pydantic import ValidationError

from openhands_rl_plugin.config.engines import ENGINES
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer

TRAINING = Path(__file__).parents[1]
OTHERS = [name for name in ENGINES if name != "local"]
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
    "context_parallel_size": 2,
    "dtype": "float32",
    "keep_token_notes": "last",
    "cispo_low": 0.5,
    "lora_alpha": 16,
    "target_modules": ("q_proj",),
}
"""Of each key that some engine lacks or has some values of, one that it refuses."""


def needed(engine: str, algorithm: str) -> dict[str, object]:
    """The settings by which the engine has the algorithm."""
    return {each.key: each.values[0] for each in ENGINES[engine].only if each.algorithm == algorithm}


def test_every_engine_is_declared() -> None:
    assert set(ENGINES) == set(get_args(TrainingSettings.model_fields["engine"].annotation))
    assert set(SHOWN) == set(OTHERS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_has_an_algorithm_or_refuses_it_in_one_line(engine: str, algorithm: str) -> None:
    if algorithm in ENGINES[engine].without:
        with pytest.raises(ValidationError, match=f'engine = "{engine}" has no algorithm = "{algorithm}"') as refused:
            TrainingSettings(engine=engine, algorithm=algorithm)
        assert "\n" not in refused.value.errors()[0]["msg"]
    else:
        assert TrainingSettings(engine=engine, algorithm=algorithm, **needed(engine, algorithm)).engine == engine


@pytest.mark.parametrize(
    ("engine", "key"),
    [(name, key) for name in OTHERS for key in (*ENGINES[name].lacks, *(each.key for each in ENGINES[name].only))],
)
def test_what_an_engine_lacks_is_refused_in_one_line(engine: str, key: str) -> None:
    algorithm = next((each.algorithm for each in ENGINES[engine].only if each.key == key), "") or "grpo"
    TrainingSettings(engine="local", algorithm=algorithm, **{key: VALUES[key]})
    with pytest.raises(ValidationError, match=f'engine = "{engine}".*: set ') as refused:
        TrainingSettings(engine=engine, algorithm=algorithm, **{key: VALUES[key]})
    assert "\n" not in refused.value.errors()[0]["msg"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_local_engine_trains_by_every_algorithm(algorithm: str, model: Path) -> None:
    samples = make_samples(4) if algorithm == "dpo" else segmented(make_samples(4))
    changes = {"algorithm": algorithm, "num_epochs": 1, "batch_size": 4}
    trainer = LoraTrainer(model, EXACT.model_copy(update=changes))
    metrics = learn(trainer, samples, algorithm)
    assert metrics.steps == 1 and metrics.grad_norm > 0


def test_pairs_are_refused_by_an_engine_without_them(model: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: .ci/peers trl")
    from openhands_rl_plugin.training.trl.trainer import TRLTrainer

    trainer = TRLTrainer(model, TrainingSettings(engine="trl", dtype="float32"), "tiny")
    with pytest.raises(TrainingError, match="does not learn from pairs"):
        learn(trainer, make_samples(2), "dpo")


@pytest.mark.parametrize("engine", OTHERS)
def test_the_gradient_of_every_algorithm_of_an_engine_is_compared(engine: str) -> None:
    """The tests with the real packages are made of this, so the table may say "all"."""
    shown = SHOWN[engine]
    assert set(shown.gradients) == set(ALGORITHMS) - set(ENGINES[engine].without)
    for algorithm, given in shown.gradients.items():
        assert needed(engine, algorithm).items() <= given.items()
        TrainingSettings(engine=engine, algorithm=algorithm, **given)
    assert all(name in ENGINES[engine].requires or name in shown.on.lower() for name in shown.packages)


def test_every_test_that_the_table_names_is_there() -> None:
    for row in TOLD:
        assert row.by and set(row.cells) == set(ENGINES)
        for name in row.by:
            path, _, function = name.partition("::")
            tree = ast.parse((TRAINING / path).read_text(encoding="utf-8"))
            assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name


def test_the_table_has_a_column_for_every_engine() -> None:
    lines = table().strip().splitlines()
    assert {line.count("|") for line in lines} == {len(ENGINES) + 2}
