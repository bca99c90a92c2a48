"""Whose logprobs the ratio is taken to, and at which temperature: a server's differ from the trainer's own."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import EXACT, make_samples
from peft import PeftModel
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.arrays import Floats, Mask
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import PolicyRef, Sample
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = pytest.mark.contract

ONE_STEP = EXACT.model_copy(update={"num_epochs": 1, "batch_size": 8, "max_grad_norm": 1e9})
MISMATCH = 0.03
"""Nats a token, of a bfloat16 server from a trainer."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trainer_of(model: Path, **changes: Any) -> LocalTrainer:
    trainer = LocalTrainer(model, TrainingSettings.model_validate(ONE_STEP.model_dump() | changes))
    torch.manual_seed(0)
    for parameter in trainer.parameters.values():
        torch.nn.init.normal_(parameter, std=0.05)
    return trainer


def served(
    trainer: LocalTrainer,
    model: Path,
    directory: Path,
    *,
    temperature: float = 1.0,
    reported: float | None = None,
    noise: float = MISMATCH,
    version: int | None = None,
) -> list[Sample]:
    """Samples as another engine of the same weights records them, at ``temperature``, with its logprobs at
    ``reported``: by transformers and PEFT alone."""
    trainer.save_adapter(directory)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    wrapped = PeftModel.from_pretrained(base, str(directory))
    torch.manual_seed(1)
    made = []
    for sample in make_samples(8):
        with torch.no_grad():
            logits = wrapped(torch.tensor([sample.input_ids])).logits[0, :-1]
        scaled = torch.log_softmax(logits / (reported or temperature), -1)
        values = scaled.gather(1, torch.tensor(sample.input_ids)[1:, None])[:, 0] + noise * torch.randn(len(scaled))
        logprobs = [value if own else 0.0 for value, own in zip([0.0, *values.tolist()], sample.mask, strict=True)]
        policy = PolicyRef(base_model="m", adapter="a", version=version) if version else None
        update = {"logprobs": Floats(logprobs), "temperature": temperature, "policy": policy}
        made.append(sample.model_copy(update=update))
    return made


@pytest.mark.parametrize(
    ("changes", "recomputed"),
    [
        ({}, False),
        ({"clip_low": 0.01, "clip_high": 0.3}, True),
        ({"clip_low": 0.3, "clip_high": 0.01}, True),
        ({"algorithm": "cispo", "clip_low": 0.9, "clip_high": 0.01}, True),
        ({"algorithm": "cispo", "clip_low": 0.9}, False),
        ({"old_logprobs": "recomputed"}, True),
        ({"correction": "truncate"}, True),
        ({"clip_low": 0.01, "old_logprobs": "recorded"}, False),
    ],
)
def test_they_are_recomputed_where_the_bounds_are_tighter_than_the_mismatch(
    model: Path, tmp_path: Path, changes: dict[str, Any], recomputed: bool
) -> None:
    settings = {"algorithm": "grpo", **changes}
    samples = served(trainer_of(model), model, tmp_path)
    metrics = trainer_of(model, **settings).reinforce(samples)
    assert (abs(metrics["approx_kl"]) < 1e-6) == recomputed


@pytest.mark.parametrize("changes", [{"algorithm": "gspo"}, {"algorithm": "grpo", "clip_low": 0.01}])
def test_what_an_older_version_sampled_keeps_the_recorded_ones(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    trainer = trainer_of(model, **changes)
    own = served(trainer, model, tmp_path)
    older = [
        sample.model_copy(
            update={
                "policy": PolicyRef(base_model="m", adapter="a", version=1),
                "logprobs": Floats(map(float.__sub__, sample.logprobs, map(float, sample.mask))),
            }
        )
        for sample in own[4:]
    ]
    with caplog.at_level(logging.WARNING):
        metrics = trainer.reinforce([*own[:4], *older])
    assert metrics["ratio"] > 1.5, "a ratio of 1 would say that the policy has not moved since"
    assert "4 of 8 samples are of other versions" in caplog.text and 'correction = "truncate"' in caplog.text
    corrected = trainer_of(model, **changes, correction="truncate").reinforce([*own[:4], *older])
    assert corrected["ratio"] == pytest.approx(1.0, abs=1e-5) and corrected["weight"] > 1.2


def test_a_killed_call_goes_on_with_the_old_logprobs_of_its_beginning(model: Path, tmp_path: Path) -> None:
    changes = {"algorithm": "gspo", "batch_size": 2, "num_epochs": 2, "checkpoint_steps": 1}
    samples = served(trainer_of(model), model, tmp_path, temperature=0.7, reported=1.0)
    whole = trainer_of(model, **changes)
    expected = whole.reinforce(samples, run=tmp_path / "whole")

    class Stopped(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress["done"] == 3:
            raise Stopped

    with pytest.raises(Stopped):
        trainer_of(model, **changes).reinforce(samples, stop, run=tmp_path / "run")
    again = trainer_of(model, **changes)
    found = again.reinforce(samples, run=tmp_path / "run")
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-7)
    assert found["drift"] == pytest.approx(expected["drift"], rel=1e-4)
    files = [tmp_path / each / "metrics.jsonl" for each in ("run", "whole")]
    ours, theirs = ([json.loads(line)["drift"] for line in file.read_text().splitlines()] for file in files)
    assert ours == pytest.approx(theirs, rel=1e-4), "like is compared with like after the restart too"
    for name, parameter in again.parameters.items():
        torch.testing.assert_close(parameter, whole.parameters[name], rtol=0, atol=0)


def plain_gradients(
    model: Path, adapter: Path, samples: list[Sample], temperature: float, base: Path | None = None
) -> dict[str, torch.Tensor]:
    """GRPO's token mean with k3 to the base model, one sample at a time, with transformers and PEFT alone."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    wrapped = PeftModel.from_pretrained(loaded, str(adapter), is_trainable=True)
    total = sum(sum(sample.mask) for sample in samples)
    for sample in samples:
        ids, mask = torch.tensor([sample.input_ids]), torch.tensor(sample.mask[1:])
        chosen = ids[0, 1:, None]
        now = torch.log_softmax(wrapped(ids).logits[0, :-1] / temperature, -1).gather(1, chosen)[:, 0]
        with wrapped.disable_adapter(), torch.no_grad():
            reference = torch.log_softmax(wrapped(ids).logits[0, :-1] / temperature, -1).gather(1, chosen)[:, 0]
        ratio = torch.exp(now - torch.tensor(sample.logprobs[1:]))
        losses = -torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.28) * sample.advantage)
        losses = losses + 0.5 * ratio * (torch.exp(reference - now) - 1 - (reference - now))
        (losses[mask].sum() / total).backward()
    return {name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad and p.grad is not None}


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_gradient_at_a_temperature_is_that_of_the_divided_logits(
    model: Path, tmp_path: Path, temperature: float
) -> None:
    changes = {"algorithm": "reinforce++-baseline", "kl": "k3", "kl_coefficient": 0.5, "old_logprobs": "recorded"}
    trainer = trainer_of(model, **changes, max_tokens_per_micro_batch=100)
    samples = served(trainer, model, tmp_path, temperature=temperature, noise=0.3)
    expected = plain_gradients(model, tmp_path, samples, temperature)
    trainer.reinforce(samples)
    assert trainer.parameters.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(trainer.parameters[name].grad, gradient, rtol=5e-4, atol=5e-6, msg=name)


def test_every_token_has_the_temperature_of_its_own_turn(model: Path, tmp_path: Path) -> None:
    """A sample with two temperatures has the mean gradient of its halves."""
    trainer = trainer_of(model, algorithm="grpo", old_logprobs="recomputed", aggregation="token")
    (whole, *_) = served(trainer, model, tmp_path, temperature=0.5)
    trained = [at for at, own in enumerate(whole.mask) if own]
    half = trained[len(trained) // 2]
    mixed = whole.model_copy(
        update={"token_temperatures": Floats(0.5 if at < half else 2.0 for at in range(len(whole.mask)))}
    )
    trainer.reinforce([mixed])
    expected: dict[str, torch.Tensor] = {}
    for temperature, first in ((0.5, True), (2.0, False)):
        mask = Mask(own and (at < half) == first for at, own in enumerate(whole.mask))
        one = whole.model_copy(update={"temperature": temperature, "mask": mask})
        alone = trainer_of(model, algorithm="grpo", old_logprobs="recomputed", aggregation="token")
        alone.reinforce([one])
        for name, parameter in alone.parameters.items():
            assert parameter.grad is not None
            share = sum(mask) / len(trained)
            expected[name] = expected.get(name, torch.zeros(())) + share * parameter.grad
    for name, gradient in expected.items():
        torch.testing.assert_close(trainer.parameters[name].grad, gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_servers_that_report_logprobs_of_temperature_one_are_found_out(model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model)
    scaled = served(trainer, model, tmp_path, temperature=0.7)
    unscaled = served(trainer, model, tmp_path, temperature=0.7, reported=1.0)
    as_recorded = trainer_of(model, algorithm="grpo").reinforce(scaled, run=tmp_path / "run")
    assert as_recorded["approx_kl"] == pytest.approx(MISMATCH**2 / 2, rel=0.5), "processed: the recorded ones are used"
    metrics = trainer_of(model, algorithm="grpo").reinforce(unscaled)
    assert abs(metrics["approx_kl"]) < 1e-6 and metrics["clip_share"] == 0.0
    assert metrics["drift"] == pytest.approx(as_recorded["drift"], rel=0.3), "like with like: at temperature 1"
    corrected = trainer_of(model, algorithm="grpo", correction="truncate")
    assert corrected.reinforce(scaled)["weight"] == pytest.approx(1.0, abs=0.05)
    for settings in ({"correction": "truncate"}, {"old_logprobs": "recorded"}):
        with pytest.raises(TrainingError, match=r"those of temperature 1, but .* --logprobs-mode processed_logprobs"):
            trainer_of(model, algorithm="grpo", **settings).reinforce(unscaled)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    cold = trainer_of(model, algorithm="grpo").reinforce(served(trainer, model, tmp_path))
    assert first["entropy"] < cold["entropy"]


def test_greedy_answers_are_not_reinforced_and_imitation_is_of_temperature_one(model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model)
    samples = served(trainer, model, tmp_path, temperature=0.5)
    with pytest.raises(TrainingError, match="sampled at temperature 0"):
        trainer.reinforce([sample.model_copy(update={"temperature": 0.0}) for sample in samples])
    plain = [sample.model_copy(update={"temperature": 1.0}) for sample in samples]
    losses = [trainer_of(model, algorithm="sft").sft(each)["loss"] for each in (samples, plain)]
    assert losses[0] == losses[1]
