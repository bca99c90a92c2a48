"""All weights and QLoRA: what is written, what is refused, steps that bfloat16 alone would lose; and schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_samples import EXACT, adapter_of, assert_same, make_samples
from tiny_model import write_model
from train_store import episode, store_of
from transformers import AutoModelForCausalLM

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.learn import memory_needed
from openhands_rl_plugin.training.trainer.metrics import learning_rates
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

FULL = EXACT.model_copy(update={"method": "full", "algorithm": "sft", "learning_rate": 1e-3, "aggregation": "token"})


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_model_directory_comes_out_and_is_what_was_trained(model: Path, tmp_path: Path) -> None:
    trainer = LocalTrainer(model, FULL)
    metrics = trainer.sft(make_samples(4))
    assert metrics["last_loss"] < metrics["first_loss"]
    made = AdapterStore(tmp_path).create("made", trainer.save_adapter, base_model="tiny")
    loaded = AutoModelForCausalLM.from_pretrained(made.path)
    ids = torch.arange(3, 40)
    logprobs = torch.log_softmax(loaded(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, torch.tensor(trainer.probe(ids.tolist()).logprobs), rtol=1e-4, atol=1e-4)
    assert (Path(made.path) / "tokenizer.json").exists(), "a server can start from it"
    again = LocalTrainer(made.path, FULL).sft(make_samples(4))
    assert again["first_loss"] < metrics["first_loss"]


def test_what_it_cannot_do_is_one_line(model: Path, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    made = store.create("policy", LocalTrainer(model, FULL).save_adapter, base_model="tiny")
    adapter = store.create("policy", LocalTrainer(model, EXACT).save_adapter, base_model="tiny")
    with pytest.raises(TrainingError, match=r'v000002 is an adapter, and .* method = "full" does not continue it'):
        LocalTrainer(model, FULL, adapter=adapter)
    with pytest.raises(TrainingError, match=r'is a whole model, and .* method = "lora" does not continue it'):
        LocalTrainer(model, EXACT, adapter=made)
    with pytest.raises(TrainingError, match=r'full fine-tuning keeps no base model: .* kl = "none"'):
        LocalTrainer(model, FULL.model_copy(update={"kl": "k3"}))


def test_bfloat16_keeps_steps_that_it_would_round_away(model: Path) -> None:
    half = FULL.model_copy(update={"dtype": "bfloat16", "learning_rate": 1e-6, "num_epochs": 1})
    trainer = LocalTrainer(model, half)
    before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    trainer.sft(make_samples(4))
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (trainer.parameters[name] - before[name]).abs().mean().item()
    assert 5e-7 < moved < 3e-6, "two steps of 1e-6"
    assert trainer.policy._base.get_parameter(name).dtype == torch.bfloat16


def test_the_command_writes_a_model_and_will_not_publish_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of(tmp_path / "store", *(episode(number, float(number % 2)) for number in range(4)))
    words = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "out")]
    words += ["--set", "training.dtype=float32", "training.method=full", "training.num_epochs=1"]
    words += ["training.schedule=cosine", "--algorithm"]
    for number, algorithm in enumerate(("sft", "grpo"), start=1):
        assert cli.main([*words, algorithm]) == 0
        printed = capsys.readouterr().out
        assert "optimiser" in printed and "; free: " in printed and f"policy-v00000{number}: steps 1, " in printed
    first, second = AdapterStore(tmp_path / "out").versions("policy")
    assert second.parent == first.name and first.base_model == "tiny"
    assert cli.main([*words, "sft", "--publish"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "which no running server loads" in line


@pytest.mark.slow
def test_qlora_trains_an_adapter_on_a_base_of_four_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")

    model = write_model(tmp_path / "model", model_type="qwen2", tie_word_embeddings=False)
    settings = EXACT.model_copy(update={"method": "qlora", "gradient_checkpointing": True})
    trainer = LocalTrainer(model, settings)
    layers = {type(layer.base_layer).__name__ for layer in trainer.policy._base.modules() if hasattr(layer, "lora_A")}
    assert layers == {"Linear4bit"}
    metrics = trainer.sft(make_samples(6))
    assert metrics["last_loss"] < metrics["first_loss"]
    saved = adapter_of(trainer, tmp_path / "adapter")
    again = LocalTrainer(model, settings)
    again.policy.load(tmp_path / "adapter")
    assert_same(again.policy.weights(), saved)
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
