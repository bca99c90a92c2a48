"""The trainer on a tiny real model: what it writes and starts from, and what it refuses."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from made_samples import EXACT, adapter_of, assert_same, make_samples
from peft import PeftModel
from tiny_model import write_model
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.core.arrays import Floats
from openhands_rl_plugin.core.errors import StorageError, TrainingError
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

# Recorded logprobs that are far from the trainer's, as those of ``make_samples``, would be recomputed.
RECORDED = EXACT.model_copy(update={"old_logprobs": "recorded"})


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_zero_advantages_cost_nothing_but_count(model: Path) -> None:
    samples = make_samples(4)
    samples[1::2] = [sample.model_copy(update={"advantage": 0.0}) for sample in samples[1::2]]
    settings = EXACT.model_copy(update={"num_epochs": 1, "batch_size": 4})
    metrics, live = (LocalTrainer(model, settings).reinforce(some) for some in (samples, samples[::2]))
    share = sum(sum(s.mask) for s in samples[::2]) / sum(sum(s.mask) for s in samples)
    assert metrics["loss"] == pytest.approx(live["loss"] * share, rel=1e-5)
    assert (metrics["skipped_samples"], metrics["tokens"]) == (2, live["tokens"])
    skipped = LocalTrainer(model, settings).reinforce(samples[1::2])
    assert (skipped["steps"], skipped["skipped_steps"]) == (0, 1)


def test_the_saved_adapter_is_of_peft_and_bfloat16_is_close(model: Path, tmp_path: Path) -> None:
    for dtype, bound in (("float32", 1e-4), ("bfloat16", 0.2)):
        trainer = LocalTrainer(model, EXACT.model_copy(update={"dtype": dtype, "num_epochs": 4, "seed": 3}))
        trainer.sft(make_samples(2))
        trainer.save_adapter(tmp_path / dtype)
        config = json.loads((tmp_path / dtype / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(model)
        assert all(tensor.dtype == torch.float32 for tensor in trainer.parameters.values())
        probe = trainer.probe(range(5, 60))
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        wrapped = PeftModel.from_pretrained(base, str(tmp_path / dtype))
        ids = torch.tensor([probe.token_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(wrapped(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        assert (logprobs - torch.tensor(probe.logprobs)).abs().mean().item() < bound


def test_a_trainer_starts_from_a_stored_adapter(model: Path, tmp_path: Path) -> None:
    store, first = AdapterStore(tmp_path), LocalTrainer(model, EXACT)
    first.sft(make_samples())
    adapter = store.create("shop", first.save_adapter, base_model="tiny")
    again = LocalTrainer(model, EXACT, adapter=adapter)
    assert again.probe(range(2, 20)).logprobs == first.probe(range(2, 20)).logprobs
    for name, value, expected in (
        ("lora_rank", 4, r"lora_rank = \d+, and \[rl.training\] has 4"),
        ("lora_variant", "rslora", 'lora_variant = "lora", and .* "rslora"'),
        ("target_modules", ("q_proj",), r'target_modules = \[.*\], and .* \["q_proj"\]'),
    ):
        with pytest.raises(TrainingError, match=expected):
            LocalTrainer(model, EXACT.model_copy(update={name: value}), adapter=adapter)
    with pytest.raises(TrainingError, match="does not fit"):
        LocalTrainer(write_model(tmp_path / "other", hidden_size=32), EXACT, adapter=adapter)
    (Path(adapter.path) / "adapter_model.safetensors").write_bytes(b"something else")
    with pytest.raises(TrainingError, match="was changed"):
        LocalTrainer(model, EXACT, adapter=adapter)


def changed(**update: object) -> Sample:
    return make_samples(1)[0].model_copy(update=update)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (changed(mask=(True,) * 40), "no context"),
        (changed(mask=(False,) * 40), "a sampled token"),
        (changed(logprobs=()), "a logprob for each token"),
        (changed(input_ids=(511, 512, *range(38))), "vocabulary"),
        (changed(input_ids=(1,) * 513, mask=(False,) + (True,) * 512, logprobs=(0.0,) * 513), "made for 512"),
    ],
)
def test_samples_that_cannot_be_trained_are_named(model: Path, sample: Sample, expected: str) -> None:
    with pytest.raises(TrainingError, match=expected) as caught:
        LocalTrainer(model, EXACT).sft([*make_samples(2), sample])
    assert "trajectory 0" in str(caught.value)


def test_a_loss_that_is_not_finite_stops_with_the_weights_unchanged(model: Path, tmp_path: Path) -> None:
    trainer = LocalTrainer(model, RECORDED)
    before = adapter_of(trainer, tmp_path / "before")
    sample = changed(advantage=-1.0)
    bad = sample.model_copy(update={"logprobs": Floats(-1e4 if m else 0.0 for m in sample.mask)})
    with pytest.raises(TrainingError, match="the loss is inf"):
        trainer.reinforce([bad])
    assert_same(adapter_of(trainer, tmp_path / "after"), before)
    assert trainer.step == 0
    with pytest.raises(TrainingError, match="nothing to train on"):
        trainer.sft([])


def test_models_and_states_that_cannot_be_trained_are_one_line(tmp_path: Path, model: Path) -> None:
    with pytest.raises(TrainingError, match="cannot load the model"):
        LocalTrainer(tmp_path / "absent", EXACT)
    # Its output layer is more than a product, so that logprobs of the hidden states would be others.
    more = write_model(tmp_path / "bert", model_type="bert", is_decoder=True)
    with pytest.raises(TrainingError, match=r"this architecture \(bert\) cannot be trained: its logprobs differ"):
        LocalTrainer(more, EXACT.model_copy(update={"target_modules": ("query", "value")}))
    trainer = LocalTrainer(model, EXACT)
    trainer.save_state(tmp_path / "fresh")
    state = tmp_path / "fresh" / "trainer_state.pt"
    state.write_bytes(state.read_bytes()[:-10])
    with pytest.raises(TrainingError, match="cannot read the training state"):
        trainer.load_state(tmp_path / "fresh")


@contextmanager
def no_space_left(limit: int = 4096) -> Iterator[None]:
    """Every file that is written ends at ``limit`` bytes with an ``OSError``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_old_state(model: Path, tmp_path: Path) -> None:
    trainer = LocalTrainer(model, EXACT)
    trainer.save_state(tmp_path / "state")
    before = (tmp_path / "state" / "trainer_state.pt").read_bytes()
    trainer.sft(make_samples(2))
    store = AdapterStore(tmp_path / "adapters")
    with no_space_left(), pytest.raises(StorageError, match="free some space"):
        trainer.save_state(tmp_path / "state")
    with no_space_left(), pytest.raises(StorageError, match="free some space"):
        store.create("shop", trainer.save_adapter, base_model="tiny")
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["trainer_state.pt"]
    assert (tmp_path / "state" / "trainer_state.pt").read_bytes() == before
    assert store.versions("shop") == ()
