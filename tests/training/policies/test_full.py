"""Training of all weights: gradients against transformers alone, what is written, what is refused, resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_samples import EXACT, assert_same, make_samples
from tiny_model import write_model
from train_store import episode, store_of
from transformers import AutoModelForCausalLM

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

FULL = EXACT.model_copy(update={"method": "full", "algorithm": "sft", "learning_rate": 1e-3, "aggregation": "token"})


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def plain_gradients(model: Path, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """The token mean one sample at a time with transformers and autograd alone."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    total = sum(sum(sample.mask) for sample in samples)
    for sample in samples:
        ids, mask = torch.tensor([sample.input_ids]), torch.tensor(sample.mask[1:])
        logprobs = torch.log_softmax(base(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        (-logprobs[mask].sum() / total).backward()
    return {name: p.grad for name, p in base.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("architecture", "checkpointing"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "qwen2", "tie_word_embeddings": False}, False),
        ({"model_type": "qwen3"}, True),
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_gradients_are_those_of_transformers(
    architecture: dict[str, object], checkpointing: bool, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", **architecture)
    samples = make_samples(4)
    one = {"num_epochs": 1, "batch_size": 4, "max_grad_norm": 1e9, "max_tokens_per_micro_batch": 100}
    trainer = LocalTrainer(model, FULL.model_copy(update={**one, "gradient_checkpointing": checkpointing}))
    trainer.sft(samples)
    expected = plain_gradients(model, samples)
    assert trainer.parameters.keys() == expected.keys()
    for name, gradient in expected.items():
        found = trainer.parameters[name].grad
        assert found is not None
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-5, msg=name)


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


def test_a_killed_reinforcement_of_all_weights_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    settings = EXACT.model_copy(
        update={"method": "full", "algorithm": "gspo", "correction": "truncate", "learning_rate": 1e-3}
        | {"checkpoint_steps": 1}
    )
    straight = LocalTrainer(model, settings)
    straight.reinforce(make_samples(4))

    def killed(at: dict[str, float]) -> None:
        if at["done"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalTrainer(model, settings).reinforce(make_samples(4), killed, run=tmp_path)
    resumed = LocalTrainer(model, settings)
    resumed.reinforce(make_samples(4), run=tmp_path)
    assert_same(dict(straight.parameters), dict(resumed.parameters))
    assert resumed.step == straight.step == 4


def test_what_it_cannot_do_is_one_line(model: Path, tmp_path: Path) -> None:
    trainer = LocalTrainer(model, FULL)
    store = AdapterStore(tmp_path)
    made = store.create("policy", trainer.save_adapter, base_model="tiny")
    assert LocalTrainer(model, FULL, adapter=made).probe(range(2, 20)) == trainer.probe(range(2, 20))
    lora = LocalTrainer(model, EXACT)
    adapter = store.create("policy", lora.save_adapter, base_model="tiny")
    with pytest.raises(
        TrainingError, match=r'policy-v000002 is an adapter, and .* method = "full" does not continue it'
    ):
        LocalTrainer(model, FULL, adapter=adapter)
    with pytest.raises(TrainingError, match=r'is a whole model, and .* method = "lora" does not continue it'):
        LocalTrainer(model, EXACT, adapter=made)
    (Path(made.path) / "model.safetensors").write_bytes(b"other")
    with pytest.raises(TrainingError, match=r"was changed since it was made \(sha256 differs\)"):
        LocalTrainer(model, FULL, adapter=made)
    with pytest.raises(TrainingError, match=r'full fine-tuning keeps no base model: .* kl = "none"'):
        LocalTrainer(model, FULL.model_copy(update={"kl": "k3"}))
    with pytest.raises(TrainingError, match="is not a directory"):
        # The name of a cached model has no files of its own to copy.
        trainer._policy.model_path = "org/name"
        trainer._policy._prepare(FULL)


def test_bfloat16_keeps_steps_that_it_would_round_away(model: Path) -> None:
    half = FULL.model_copy(update={"dtype": "bfloat16", "learning_rate": 1e-6, "num_epochs": 1})
    trainer = LocalTrainer(model, half)
    before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
    trainer.sft(make_samples(4))
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (trainer.parameters[name] - before[name]).abs().mean().item()
    assert 5e-7 < moved < 3e-6, "two steps of 1e-6"
    assert trainer._policy._base.get_parameter(name).dtype == torch.bfloat16
    learned = LocalTrainer(model, half.model_copy(update={"learning_rate": 3e-3, "num_epochs": 4}))
    metrics = learned.sft(make_samples(4))
    assert metrics["last_loss"] < metrics["first_loss"] - 0.1


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
