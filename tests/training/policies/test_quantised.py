"""Adapters beyond plain LoRA: DoRA by PEFT's own layers, and QLoRA where bitsandbytes is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from made_samples import EXACT, adapter_of, assert_same, make_samples, plain_gradients
from tiny_model import write_model

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.training.learn import memory_needed
from openhands_rl_plugin.training.trainer.metrics import learning_rates
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

DORA = EXACT.model_copy(update={"lora_variant": "dora"})


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_dora_has_the_gradients_of_peft(model: Path, tmp_path: Path) -> None:
    samples = make_samples(4)
    first = LocalTrainer(model, DORA)
    first.sft(samples)
    adapter_of(first, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["use_dora"] is True
    once = {"num_epochs": 1, "batch_size": 4, "max_grad_norm": 1e9, "clip_low": 0.2, "clip_high": 0.28}
    trainer = LocalTrainer(model, DORA.model_copy(update={**once, "algorithm": "dapo", "old_logprobs": "recorded"}))
    trainer._policy.load(tmp_path / "adapter")
    trainer.reinforce(samples)
    expected = plain_gradients(model, tmp_path / "adapter", samples)
    assert any("magnitude" in name for name in expected) and len(trainer.parameters) == len(expected)
    for name, gradient in expected.items():
        found = trainer.parameters[name].grad
        assert found is not None
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-5, msg=name)


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
    plain = LocalTrainer(model, EXACT)
    plain._policy.load(tmp_path / "adapter")
    served = plain.probe((5, 6, 7, 8))
    difference = [abs(a - b) for a, b in zip(served.logprobs, trainer.probe((5, 6, 7, 8)).logprobs, strict=True)]
    assert 0 < sum(difference) / len(difference) < trainer.probe((5, 6)).max_difference * 4
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
