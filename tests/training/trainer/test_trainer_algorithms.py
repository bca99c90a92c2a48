"""The policy gradient on a tiny real model: what passes, expectation, another engine's logprobs and temperatures do."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import EXACT, assert_same, make_samples
from peft import PeftModel
from tiny_model import write_model
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.arrays import Floats
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import PolicyRef, Sample
from openhands_rl_plugin.training.algorithms import ESTIMATORS, RolloutBatch
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = pytest.mark.contract

ONE_STEP = EXACT.model_copy(update={"num_epochs": 1, "batch_size": 8, "max_grad_norm": 1e9, "learning_rate": 1e-9})
MISMATCH = 0.03
"""Nats a token, of a bfloat16 server from a trainer."""

Trainers = Callable[..., LocalTrainer]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trainer_of(model: Path) -> Trainers:
    """The one model with other settings, always with the same weights, which change what the model says."""
    trainer = made(model)
    weights = {name: tensor.clone() for name, tensor in trainer.policy.weights().items()}

    def chosen(**changes: Any) -> LocalTrainer:
        trainer.settings = TrainingSettings.model_validate(ONE_STEP.model_dump() | changes)
        trainer.policy.set_weights(weights, "the start")
        trainer.step = 0
        return trainer

    return chosen


def made(model: Path, **changes: Any) -> LocalTrainer:
    trainer = LocalTrainer(model, TrainingSettings.model_validate(ONE_STEP.model_dump() | changes))
    torch.manual_seed(0)
    for parameter in trainer.parameters.values():
        torch.nn.init.normal_(parameter, std=0.05)
    return trainer


def gradients_of(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None}


@st.composite
def any_samples(draw: st.DrawFn) -> list[Sample]:
    """Sequences that may begin alike, with any tokens sampled."""
    begin = tuple(range(3, 3 + draw(st.integers(1, 30))))
    found = []
    for at in range(draw(st.integers(1, 5))):
        ids = begin + tuple(draw(st.lists(st.integers(0, 400), min_size=1, max_size=30)))
        mask = (False, *draw(st.lists(st.booleans(), min_size=len(ids) - 2, max_size=len(ids) - 2)), True)
        own = {"logprobs": tuple(-6.0 if sampled else 0.0 for sampled in mask), "input_ids": ids, "mask": mask}
        found.append(
            Sample(trajectory_id=str(at % 3), leaf=0, advantage=draw(st.sampled_from([-1.0, 0.5, 2.0])), **own)
        )
    return found


@settings(max_examples=12, deadline=None, derandomize=True)
@given(any_samples(), st.integers(1, 120), st.sampled_from(["grpo", "gspo", "cispo", "reinforce++-baseline"]))
def test_packed_is_unpacked(trainer_of: Trainers, samples: list[Sample], tokens_per_pass: int, algorithm: str) -> None:
    results = []
    for limit in (1, tokens_per_pass):
        trainer = trainer_of(algorithm=algorithm, max_tokens_per_micro_batch=limit)
        results.append((trainer.reinforce(samples)["loss"], gradients_of(trainer)))
    # Unlikely tokens have large ratios, so that losses and gradients are compared relative to their size.
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5, abs=1e-5)
    largest = max(gradient.abs().max().item() for gradient in results[0][1].values())
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-5, atol=1e-5 * max(1.0, largest), msg=name)


def test_a_choice_that_the_reward_does_not_depend_on_is_not_moved(tmp_path: Path) -> None:
    """All groups of a right and a wrong answer to one prompt, by their probability: the expected gradient of the token
    before what decides is zero."""
    shape = {"vocab_size": 10, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    model = write_model(tmp_path, num_hidden_layers=1, num_key_value_heads=1, **shape)
    trainer = made(model, algorithm="grpo", learning_rate=1e-12, old_logprobs="recorded")
    probabilities = [math.exp(trainer.probe((2, form)).logprobs[0]) for form in range(10)]
    advantages = ESTIMATORS["grpo"](RolloutBatch([1.0, 0.0], [0, 0], [1, 1]))
    total = {name: torch.zeros_like(parameter) for name, parameter in trainer.parameters.items()}
    largest = 0.0
    for forms in itertools.product(range(10), repeat=2):
        group = []
        for at, form in enumerate(forms):
            own = {"input_ids": (2, form, at), "logprobs": (0.0, math.log(probabilities[form]), 0.0)}
            mask = (False, True, False)
            group.append(Sample(trajectory_id=str(at), leaf=0, mask=mask, advantage=advantages[at], **own))
        trainer.reinforce(group)
        for name, gradient in gradients_of(trainer).items():
            total[name] += probabilities[forms[0]] * probabilities[forms[1]] * gradient
            largest = max(largest, gradient.abs().max().item())
    assert max(found.abs().max().item() for found in total.values()) < 1e-5 * largest


def test_gradient_checkpointing_keeps_less_and_changes_nothing(model: Path) -> None:
    results, kept = [], []
    for checkpointing in (False, True):
        trainer, held = made(model, gradient_checkpointing=checkpointing), list[int]()

        def hold(tensor: torch.Tensor, held: list[int] = held) -> torch.Tensor:
            held.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            trainer.reinforce(make_samples())
        kept.append(sum(held))
        results.append(gradients_of(trainer))
    assert kept[1] < 0.5 * kept[0]
    assert_same(results[0], results[1], 1e-6)


@pytest.fixture(scope="module")
def served(trainer_of: Trainers, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Sample]]:
    """Samples as another engine of the same weights records them, at ``temperature``, with its logprobs at
    ``reported``: by transformers and PEFT alone."""
    folder = tmp_path_factory.mktemp("served")
    trainer_of().save_adapter(folder)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    wrapped = PeftModel.from_pretrained(base, str(folder))

    def recorded(temperature: float = 1.0, reported: float | None = None) -> list[Sample]:
        torch.manual_seed(1)
        found = []
        for sample in make_samples(8):
            with torch.no_grad():
                logits = wrapped(torch.tensor([sample.input_ids])).logits[0, :-1]
            scaled = torch.log_softmax(logits / (reported or temperature), -1)
            values = scaled.gather(1, torch.tensor(sample.input_ids)[1:, None])[:, 0]
            values += MISMATCH * torch.randn(len(scaled))
            logprobs = [value if own else 0.0 for value, own in zip([0.0, *values.tolist()], sample.mask, strict=True)]
            found.append(sample.model_copy(update={"logprobs": Floats(logprobs), "temperature": temperature}))
        return found

    return recorded


@pytest.mark.parametrize(
    ("changes", "recomputed"),
    [
        ({}, False),
        ({"clip_low": 0.01, "clip_high": 0.3}, True),
        ({"algorithm": "cispo", "clip_low": 0.9, "clip_high": 0.01}, True),
        ({"algorithm": "cispo", "clip_low": 0.9}, False),
        ({"old_logprobs": "recomputed"}, True),
        ({"correction": "truncate"}, True),
        ({"clip_low": 0.01, "old_logprobs": "recorded"}, False),
    ],
)
def test_old_logprobs_are_recomputed_where_the_bounds_are_tighter_than_the_mismatch(
    trainer_of: Trainers, served: Any, changes: dict[str, Any], recomputed: bool
) -> None:
    metrics = trainer_of(**{"algorithm": "grpo", **changes}).reinforce(served())
    assert (abs(metrics["approx_kl"]) < 1e-6) == recomputed


@pytest.mark.parametrize("changes", [{"algorithm": "gspo"}, {"algorithm": "grpo", "clip_low": 0.01}])
def test_what_an_older_version_sampled_keeps_the_recorded_ones(
    trainer_of: Trainers, served: Any, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    own = served()
    policy = PolicyRef(base_model="m", adapter="a", version=1)
    lower = [Floats(map(float.__sub__, sample.logprobs, map(float, sample.mask))) for sample in own[4:]]
    older = [
        sample.model_copy(update={"policy": policy, "logprobs": each})
        for sample, each in zip(own[4:], lower, strict=True)
    ]
    with caplog.at_level(logging.WARNING):
        metrics = trainer_of(**changes).reinforce([*own[:4], *older])
    assert metrics["ratio"] > 1.5, "a ratio of 1 would say that the policy has not moved since"
    assert "4 of 8 samples are of other versions" in caplog.text and 'correction = "truncate"' in caplog.text
    corrected = trainer_of(**changes, correction="truncate").reinforce([*own[:4], *older])
    assert corrected["ratio"] == pytest.approx(1.0, abs=1e-5) and corrected["weight"] > 1.2


def test_servers_that_report_logprobs_of_temperature_one_are_found_out(trainer_of: Trainers, served: Any) -> None:
    scaled, unscaled = served(0.7), served(0.7, reported=1.0)
    as_recorded = trainer_of(algorithm="grpo").reinforce(scaled)
    assert as_recorded["approx_kl"] == pytest.approx(MISMATCH**2 / 2, rel=0.5), "processed: the recorded ones are used"
    assert as_recorded["entropy"] < trainer_of(algorithm="grpo").reinforce(served())["entropy"]
    metrics = trainer_of(algorithm="grpo").reinforce(unscaled)
    assert abs(metrics["approx_kl"]) < 1e-6 and metrics["clip_share"] == 0.0
    assert metrics["drift"] == pytest.approx(as_recorded["drift"], rel=0.3), "like with like: at temperature 1"
    corrected = trainer_of(algorithm="grpo", correction="truncate").reinforce(scaled)
    assert corrected["weight"] == pytest.approx(1.0, abs=0.05)
    for changes in ({"correction": "truncate"}, {"old_logprobs": "recorded"}):
        with pytest.raises(TrainingError, match=r"those of temperature 1, but .* --logprobs-mode processed_logprobs"):
            trainer_of(algorithm="grpo", **changes).reinforce(unscaled)


def test_greedy_answers_are_not_reinforced_and_imitation_is_of_temperature_one(
    trainer_of: Trainers, served: Any
) -> None:
    samples = served(0.5)
    with pytest.raises(TrainingError, match="sampled at temperature 0"):
        trainer_of().reinforce([sample.model_copy(update={"temperature": 0.0}) for sample in samples])
    plain = [sample.model_copy(update={"temperature": 1.0}) for sample in samples]
    losses = [trainer_of(algorithm="sft").sft(each)["loss"] for each in (samples, plain)]
    assert losses[0] == losses[1]
