"""The memory that a run will want, without loading the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_samples import EXACT
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.memory import free_memory
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
from openhands_rl_plugin.training.trainer.memory_estimate import check_fits, estimate_memory


def test_weights_and_adapter_are_counted_exactly(model: Path) -> None:
    found = estimate_memory(model, EXACT, longest=100)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert found.weights == 4 * sum(parameter.numel() for parameter in loaded.parameters())
    trainer = LoraTrainer(model, EXACT)
    assert found.adapter == 16 * sum(parameter.numel() for parameter in trainer.parameters.values())
    assert found.total == found.weights + found.adapter + found.activations


def test_longer_passes_want_more_and_checkpointing_wants_less(model: Path) -> None:
    plain = estimate_memory(model, EXACT, longest=100).activations
    assert estimate_memory(model, EXACT, longest=10_000).activations > plain
    assert estimate_memory(model, EXACT.model_copy(update={"gradient_checkpointing": True}), 100).activations < plain
    half = EXACT.model_copy(update={"dtype": "bfloat16"})
    assert estimate_memory(model, half, 100).weights * 2 == estimate_memory(model, EXACT, 100).weights


def test_what_does_not_fit_is_said_before_anything_is_loaded(model: Path) -> None:
    full = EXACT.model_copy(update={"method": "full"})
    need = estimate_memory(model, full, 100)
    assert need.optimiser == 3 * need.weights, "gradients and two moments, in float32"
    check_fits(model, full, 100, need.total)
    check_fits(model, full, 100, None)
    with pytest.raises(
        TrainingError, match=r'does not fit: method = "full" needs 0\.00 GB .* and 0\.00 GB are free: train'
    ):
        check_fits(model, full, 100, need.weights)
    free = free_memory()
    assert free is not None and free > 2**20


def test_a_folder_without_a_model_is_one_line(tmp_path: Path, model: Path) -> None:
    with pytest.raises(TrainingError, match=r"give a directory with config.json"):
        estimate_memory(tmp_path, EXACT, 1)
    config = (model / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"llama"', '"granite"'))
    with pytest.raises(TrainingError, match=r"holds no \*.safetensors"):
        estimate_memory(tmp_path, EXACT, 1)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(TrainingError, match=r"cannot read .*model.safetensors"):
        estimate_memory(tmp_path, EXACT, 1)
