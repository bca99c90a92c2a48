"""QLoRA, where bitsandbytes is installed, and the schedules of the learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_samples import EXACT, adapter_of, assert_same, make_samples
from tiny_model import write_model

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.training.learn import memory_needed
from openhands_rl_plugin.training.trainer.metrics import learning_rates
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_qlora_trains_an_adapter_on_a_base_of_four_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")

    model = write_model(tmp_path / "model", model_type="qwen2", tie_word_embeddings=False)
    settings = EXACT.model_copy(update={"method": "qlora", "gradient_checkpointing": True})
    trainer = LocalTrainer(model, settings)
    layers = {type(layer.base_layer).__name__ for layer in trainer._policy._base.modules() if hasattr(layer, "lora_A")}
    assert layers == {"Linear4bit"}
    metrics = trainer.sft(make_samples(6))
    assert metrics["last_loss"] < metrics["first_loss"]
    saved = adapter_of(trainer, tmp_path / "adapter")
    again = LocalTrainer(model, settings)
    again._policy.load(tmp_path / "adapter")
    assert_same(again._policy.weights(), saved)
    assert again.probe((5, 6, 7, 8)).logprobs == pytest.approx(trainer.probe((5, 6, 7, 8)).logprobs, abs=1e-5)
    assert memory_needed(model, settings) < memory_needed(model, EXACT)


def test_schedules_warm_up_and_end_at_zero() -> None:
    settings = TrainingSettings(learning_rate=1.0, warmup_steps=4, schedule="cosine")
    rates = list(map(learning_rates(settings, range(0, 24)), range(24)))
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[14] == pytest.approx(0.5) and rates[23] < 0.01 and sorted(rates[4:], reverse=True) == rates[4:]
    linear = settings.model_copy(update={"schedule": "linear"})
    assert learning_rates(linear, range(0, 24))(14) == pytest.approx(0.5)
    assert learning_rates(linear, range(24, 44))(24) == 1.0, "another call starts at the top again"
    constant = settings.model_copy(update={"schedule": "constant"})
    assert list(map(learning_rates(constant, range(0, 24)), (0, 4, 23))) == [0.2, 1.0, 1.0]
