"""The memory that a run will want, without loading the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from allocated import step_bytes, step_settings
from made_samples import EXACT, make_samples
from tiny_model import write_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.machine import free_memory
from openhands_rl_plugin.training.data.batch import lay_out
from openhands_rl_plugin.training.learn import check_fits, estimate_memory, model_size
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer


def test_parameters_are_counted_exactly(model: Path) -> None:
    size, loaded = model_size(model, EXACT), AutoModelForCausalLM.from_pretrained(model)
    assert size.parameters == sum(parameter.numel() for parameter in loaded.parameters())
    trainer = LocalTrainer(model, EXACT)
    assert size.trained == sum(parameter.numel() for parameter in trainer.parameters.values())
    assert estimate_memory(model, EXACT, longest=100).weights == 4 * size.parameters + 16 * size.trained


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "shape",
    [{}, {"intermediate_size": 2048}, {"hidden_size": 512, "num_hidden_layers": 12, "num_key_value_heads": 8}],
    ids=["heads", "wide", "deep"],
)
def test_a_training_step_allocates_what_was_estimated(
    shape: dict[str, int], dtype: str, checkpointing: bool, tmp_path: Path
) -> None:
    """At 2,048 tokens the attention's scratch is as much as a tenth to a half of all."""
    length, model = 2048, write_wide(tmp_path, shape)
    changes = {"dtype": dtype, "gradient_checkpointing": checkpointing}
    estimate = estimate_memory(model, step_settings(changes, length), length)
    assert step_bytes(model, changes, length) == pytest.approx(estimate.total - estimate.weights, rel=0.15)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4], ids=["flash", "flex"])
def test_a_step_on_a_gpu_allocates_what_was_estimated(count: int, tmp_path: Path) -> None:
    length = 4096
    model = write_wide(tmp_path, {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 128})
    samples = make_samples(count, length=length)
    rows = len(lay_out([sample.input_ids for sample in samples]).ids)
    changes = {"dtype": "bfloat16", "gradient_checkpointing": True, "batch_size": count}
    settings = step_settings(changes, rows)
    trainer = LocalTrainer(model, settings)
    trainer.reinforce(samples)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.reinforce(samples)
    estimate = estimate_memory(model, settings, length)
    allocated = torch.cuda.max_memory_allocated() - before
    assert allocated == pytest.approx(estimate.total - estimate.weights, rel=0.25)


def write_wide(folder: Path, changes: dict[str, int]) -> Path:
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(**{**shape, **heads, **changes})).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_what_does_not_fit_is_said_before_anything_is_loaded(model: Path) -> None:
    full = EXACT.model_copy(update={"method": "full"})
    need = estimate_memory(model, full, 100)
    assert need.weights == 16 * model_size(model, full).parameters, "weights, gradients and two moments, in float32"
    check_fits(model, full, 100, need.total)
    check_fits(model, full, 100, None)
    with pytest.raises(
        TrainingError, match=r'does not fit: method = "full" needs 0\.00 GB .* and 0\.00 GB are free: train'
    ):
        check_fits(model, full, 100, need.weights - 1)
    free = free_memory()
    assert free is not None and free > 2**20


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no folder of a model\?"):
        estimate_memory(tmp_path, EXACT, 1)
    (tmp_path / "config.json").write_text('{"model_type": "nosuch", "hidden_size": 8')
    with pytest.raises(TrainingError, match=r"cannot read .*config.json"):
        estimate_memory(tmp_path, EXACT, 1)
