"""The memory that a run will want, without loading the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated import step_bytes, step_settings
from made_samples import EXACT, make_samples
from pydantic import ValidationError
from tiny_model import write_tokenizer
from together import run_together
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from openhands_rl_plugin.config.training import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.memory import free_memory
from openhands_rl_plugin.training.data.layout import lay_out
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
from openhands_rl_plugin.training.trainer.memory_estimate import check_fits, estimate_memory


def test_weights_and_adapter_are_counted_exactly(model: Path) -> None:
    found = estimate_memory(model, EXACT, longest=100)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert found.weights == 4 * sum(parameter.numel() for parameter in loaded.parameters())
    trainer = LoraTrainer(model, EXACT)
    assert found.adapter == 16 * sum(parameter.numel() for parameter in trainer.parameters.values())
    assert found.total == found.weights + found.adapter + found.activations + found.scratch


def test_longer_passes_want_more_and_checkpointing_wants_less(model: Path) -> None:
    plain = estimate_memory(model, EXACT, longest=100).activations
    assert estimate_memory(model, EXACT, longest=10_000).activations > plain
    assert estimate_memory(model, EXACT.model_copy(update={"gradient_checkpointing": True}), 100).activations < plain
    half = EXACT.model_copy(update={"dtype": "bfloat16"})
    assert estimate_memory(model, half, 100).weights * 2 == estimate_memory(model, EXACT, 100).weights


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="heads"),
        pytest.param({"intermediate_size": 2048}, id="wide", marks=pytest.mark.slow),
        pytest.param(
            {"hidden_size": 512, "num_hidden_layers": 12, "num_key_value_heads": 8}, id="deep", marks=pytest.mark.slow
        ),
    ],
)
def test_a_training_step_allocates_what_was_estimated(
    shape: dict[str, int], dtype: str, checkpointing: bool, tmp_path: Path
) -> None:
    """At 2,048 tokens the attention's scratch is as much as a tenth to a half of all."""
    length, model = 2048, write_wide(tmp_path, shape)
    changes = {"dtype": dtype, "gradient_checkpointing": checkpointing}
    estimate = estimate_memory(model, step_settings(changes, length), length)
    assert step_bytes(model, changes, length) == pytest.approx(estimate.activations + estimate.scratch, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_shared_micro_batch_no_less_is_allocated_than_estimated(dtype: str, tmp_path: Path) -> None:
    model, changes = write_wide(tmp_path / "model", {}), {"dtype": dtype, "gradient_checkpointing": True}
    statuses, said = run_together(model, tmp_path / "bytes", changes, program="allocated.py")
    assert statuses == [0, 0], said
    shared = step_settings({**changes, "context_parallel_size": 2}, 2048)
    estimate, alone = (estimate_memory(model, each, 2048) for each in (shared, step_settings(changes, 2048)))
    assert estimate.activations + estimate.scratch < 0.6 * (alone.activations + alone.scratch)
    for rank in range(2):
        # What gloo's threads free is not seen, so that more may be counted than exists at a time.
        found = int((tmp_path / f"bytes-{rank}").read_text())
        assert 0.85 * (estimate.activations + estimate.scratch) < found


def test_scratch_is_that_of_the_kernels_of_a_gpu_where_heads_are_wide(tmp_path: Path) -> None:
    """8 heads of 256, and 2 of keys, bfloat16: 2048 x (2048 x (4 + 3 x 2) + 512 x 2 x 2 + 8 x 8) bytes."""
    half = EXACT.model_copy(update={"dtype": "bfloat16", "max_tokens_per_micro_batch": 2048})
    model = write_wide(tmp_path, {"head_dim": 256})
    assert estimate_memory(model, half, 2048).scratch == 2048 * (2048 * 10 + 512 * 4 + 64)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4], ids=["flash", "flex"])
def test_a_step_on_a_gpu_allocates_what_was_estimated(count: int, tmp_path: Path) -> None:
    length = 4096
    model = write_wide(tmp_path, {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 128})
    samples = make_samples(count, length=length)
    rows = len(lay_out([sample.input_ids for sample in samples]).ids)
    changes = {"dtype": "bfloat16", "gradient_checkpointing": True, "batch_size": count}
    settings = step_settings(changes, rows)
    trainer = LoraTrainer(model, settings)
    trainer.reinforce(samples)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.reinforce(samples)
    estimate = estimate_memory(model, settings, length)
    allocated = torch.cuda.max_memory_allocated() - before
    assert allocated == pytest.approx(estimate.activations + estimate.scratch, rel=0.25)


def write_wide(folder: Path, changes: dict[str, int]) -> Path:
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(**{**shape, **heads, **changes})).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_offloaded_activations_are_on_the_machine_and_teach_the_same(model: Path) -> None:
    kept = EXACT.model_copy(update={"gradient_checkpointing": True})
    moved = kept.model_copy(update={"activation_offloading": True})
    plain, offloaded = estimate_memory(model, kept, 100), estimate_memory(model, moved, 100)
    assert plain.host == 0 < offloaded.host == plain.activations - offloaded.activations
    trainers = LoraTrainer(model, kept), LoraTrainer(model, moved)
    copied: list[torch.Tensor] = []
    with watched_copies(copied):
        ended = [trainer.sft(make_samples(2)) for trainer in trainers]
    assert ended[0].loss == ended[1].loss and ended[0].grad_norm == ended[1].grad_norm
    weights = [trainer.parameters for trainer in trainers]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # Two steps of two layers: their inputs, and nothing else.
    assert len(copied) == 4 and {each.shape[-1] for each in copied} == {64} and {each.dim() for each in copied} == {3}
    assert any("no effect without a GPU" in note for note in trainers[1].notes) == (not torch.cuda.is_available())
    assert not any("GPU" in note for note in trainers[0].notes)


@contextmanager
def watched_copies(copied: list[torch.Tensor]) -> Iterator[None]:
    """What is saved while ``torch.autograd.graph.save_on_cpu`` is on."""
    original = torch.autograd.graph.save_on_cpu.__init__

    def watched(self: torch.autograd.graph.save_on_cpu, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        pack = self.pack_hook
        self.pack_hook = lambda tensor: (copied.append(tensor), pack(tensor))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.graph.save_on_cpu, "__init__", watched)
        yield


def test_offloading_is_of_what_checkpointing_saves() -> None:
    with pytest.raises(ValidationError, match="set gradient_checkpointing, too"):
        TrainingSettings(activation_offloading=True)


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
