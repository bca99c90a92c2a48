"""Every algorithm on a tiny real model: its loss against plain sums, its passes against one pass, its references."""

from __future__ import annotations

import itertools
import math
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
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.algorithms import (
    ALGORITHMS,
    ESTIMATORS,
    RolloutBatch,
    aggregation_of,
    clip_bounds,
)
from openhands_rl_plugin.training.data.dataset import PreferencePair
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = pytest.mark.contract

ONE_STEP = EXACT.model_copy(update={"num_epochs": 1, "batch_size": 6, "max_grad_norm": 1e9})
REINFORCING = [name for name, each in ALGORITHMS.items() if each.kind == "reinforcement" and each.rewarded]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trainer_of(model: Path, **changes: Any) -> LocalTrainer:
    """With weights that change what the model says."""
    settings = TrainingSettings.model_validate(ONE_STEP.model_dump() | changes)
    if settings.algorithm in REINFORCING and settings.old_logprobs == "auto" and settings.correction == "none":
        settings = settings.model_copy(update={"old_logprobs": "recorded"})  # ``spoken`` makes them differ by a lot
    trainer = LocalTrainer(model, settings)
    torch.manual_seed(0)
    for parameter in trainer.parameters.values():
        torch.nn.init.normal_(parameter, std=0.05)
    return trainer


def spoken(trainer: LocalTrainer, samples: list[Sample]) -> list[Sample]:
    """The samples with logprobs near those of the trainer's own policy, as a server would have recorded them."""
    torch.manual_seed(1)
    made = []
    for sample in samples:
        values = torch.tensor((0.0, *trainer.probe(sample.input_ids).logprobs))
        noisy = (values + 0.3 * torch.randn(len(values))).tolist()
        logprobs = tuple(value if sampled else 0.0 for value, sampled in zip(noisy, sample.mask, strict=True))
        made.append(Sample.model_validate({**dict(sample), "logprobs": logprobs}))
    return made


def logprobs_of(trainer: LocalTrainer, sample: Sample) -> torch.Tensor:
    return torch.tensor((0.0, *trainer.probe(sample.input_ids).logprobs))[torch.tensor(sample.mask)]


def recorded_of(sample: Sample) -> torch.Tensor:
    return torch.tensor(sample.logprobs)[torch.tensor(sample.mask)]


def loss_by_hand(trainer: LocalTrainer, samples: list[Sample], base: LocalTrainer | None = None) -> float:
    """The loss of one optimiser batch, a sample at a time."""
    chosen = trainer.settings
    low, high = clip_bounds(chosen)
    lengths = [sum(sample.mask) for sample in samples]
    total = 0.0
    for sample, length in zip(samples, lengths, strict=True):
        now = logprobs_of(trainer, sample)
        difference = now - recorded_of(sample)
        ratio = torch.exp(difference.mean() if chosen.algorithm == "gspo" else difference)
        clipped = ratio.clamp(1 - low, 1 + high)
        if chosen.algorithm == "cispo":
            losses = -clipped * sample.advantage * now
        else:
            losses = -torch.minimum(ratio * sample.advantage, clipped * sample.advantage).expand(length)
        if base is not None:
            away = now - logprobs_of(base, sample)
            losses = losses + chosen.kl_coefficient * torch.exp(difference) * (torch.exp(-away) - 1 + away)
        weight = {
            "token": 1 / sum(lengths),
            "sequence": 1 / (len(samples) * length),
            "fixed": 1 / (len(samples) * max(lengths)),
        }[aggregation_of(chosen)]
        total += weight * losses.sum().item()
    return total


@pytest.mark.parametrize(
    ("algorithm", "kl"), [*((name, "none") for name in REINFORCING), ("grpo", "k3"), ("gspo", "k3"), ("cispo", "k3")]
)
def test_the_loss_is_the_papers_and_passes_do_not_change_it(model: Path, algorithm: str, kl: str) -> None:
    results = []
    for tokens_per_pass in (1, 100_000):
        divergence = {"kl": kl, "kl_coefficient": 0.5} if kl != "none" else {}
        trainer = trainer_of(model, algorithm=algorithm, max_tokens_per_micro_batch=tokens_per_pass, **divergence)
        samples = spoken(trainer, make_samples())
        base = LocalTrainer(model, ONE_STEP) if kl == "k3" else None
        expected = loss_by_hand(trainer, samples, base)
        metrics = trainer.reinforce(samples)
        assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
        assert (metrics["kl"] > 0) == (kl == "k3")
        gradients = {name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None}
        results.append((metrics, gradients))
    assert results[0][0]["loss"] == pytest.approx(results[1][0]["loss"], abs=1e-5)
    assert_same(results[0][1], results[1][1], 1e-5)
    assert results[0][0]["drift"] == pytest.approx(results[1][0]["drift"], rel=1e-4) != 0


def test_a_choice_that_the_reward_does_not_depend_on_is_not_moved(tmp_path: Path) -> None:
    """All groups of a right and a wrong answer to one prompt, by their probability: the expected gradient of the token
    before what decides is zero."""
    shape = {"vocab_size": 10, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    model = write_model(tmp_path, num_hidden_layers=1, num_key_value_heads=1, **shape)
    trainer = trainer_of(model, algorithm="grpo", batch_size=2, learning_rate=1e-12)
    probabilities = [math.exp(trainer.probe((2, form)).logprobs[0]) for form in range(10)]
    right, wrong = ESTIMATORS["grpo"](RolloutBatch([1.0, 0.0], [0, 0], [1, 1]))
    total = {name: torch.zeros_like(parameter) for name, parameter in trainer.parameters.items()}
    largest = 0.0
    for forms in itertools.product(range(10), repeat=2):
        group = [
            Sample(
                trajectory_id=str(at),
                leaf=0,
                input_ids=(2, form, at),
                mask=(False, True, False),
                logprobs=(0.0, math.log(probabilities[form]), 0.0),
                advantage=advantage,
            )
            for at, (form, advantage) in enumerate(zip(forms, (right, wrong), strict=True))
        ]
        trainer.reinforce(group)
        for name, parameter in trainer.parameters.items():
            assert parameter.grad is not None
            total[name] += probabilities[forms[0]] * probabilities[forms[1]] * parameter.grad
            largest = max(largest, parameter.grad.abs().max().item())
    assert max(found.abs().max().item() for found in total.values()) < 1e-5 * largest


def test_the_entropy_bonus_is_that_of_autograd_and_reaches_samples_without_an_advantage(
    model: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(model, algorithm="grpo", entropy_coefficient=0.7)
    samples = [each.model_copy(update={"advantage": 0.0}) for each in spoken(trainer, make_samples())]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    trainer.save_adapter(tmp_path)
    plain = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    total = 0.0
    for sample in samples:
        expected = torch.log_softmax(plain(torch.tensor([sample.input_ids])).logits[0, :-1], -1)
        entropy = -(expected.exp() * expected).sum(-1)[torch.tensor(sample.mask[1:])]
        loss = -0.7 * entropy.mean() / len(samples)
        loss.backward()
        total += loss.item()
    assert trainer.reinforce(samples)["loss"] == pytest.approx(total, abs=1e-5)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for name, parameter in trainer.parameters.items():
        found = parameter.grad
        assert found is not None
        torch.testing.assert_close(found, wanted[name], rtol=1e-3, atol=1e-6, msg=name)


def test_each_segment_of_a_rollout_has_its_own_ratio_in_gspo_and_the_rollout_one_weight(model: Path) -> None:
    for tokens_per_pass in (1, 100_000):
        bounds = {"clip_low": 0.9, "clip_high": 9.0, "max_tokens_per_micro_batch": tokens_per_pass}
        trainer = trainer_of(model, algorithm="gspo", **bounds)
        one, two, three = spoken(trainer, make_samples(3))
        two = two.model_copy(update={"trajectory_id": one.trajectory_id, "advantage": 1.0})
        ratios = [torch.exp((logprobs_of(trainer, s) - recorded_of(s)).mean()).item() for s in (one, two, three)]
        counts = [sum(s.mask) for s in (one, two)]
        rollout = sum(ratio * count for ratio, count in zip(ratios, counts, strict=False)) / sum(counts)
        expected = -(rollout + ratios[2] * three.advantage) / 2
        assert trainer.reinforce([one, two, three])["loss"] == pytest.approx(expected, abs=1e-5)


def test_stale_rollouts_are_weighed_against_the_policy_as_it_was(model: Path) -> None:
    trainer = trainer_of(model, correction="truncate", correction_high=1.1)
    samples = spoken(trainer, make_samples())
    old = [logprobs_of(trainer, sample) for sample in samples]
    ratios = torch.cat([torch.exp(o - recorded_of(s)) for o, s in zip(old, samples, strict=True)])
    weights = ratios.clamp(max=1.1)
    advantages = torch.cat([torch.full((len(o),), s.advantage) for o, s in zip(old, samples, strict=True)])
    metrics = trainer.reinforce(samples)
    assert metrics["loss"] == pytest.approx(-(weights * advantages).mean().item(), abs=1e-5)
    assert metrics["weight"] == pytest.approx(weights.mean().item(), abs=1e-5)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4), "the clip is around the policy as it was"
    assert metrics["drift"] == pytest.approx(ratios.log().abs().mean().item(), abs=1e-4)


def test_preferences_begin_at_even_odds_and_widen(model: Path) -> None:
    trainer = trainer_of(
        model, algorithm="dpo", learning_rate=1e-2, num_epochs=8, batch_size=2, max_tokens_per_micro_batch=1
    )
    samples = make_samples(4)
    pairs = [PreferencePair((samples[0],), (samples[1],)), PreferencePair((samples[2],), (samples[3],))]
    before = [logprobs_of(trainer, sample).sum().item() for sample in samples]
    metrics = trainer.prefer(pairs)
    assert metrics["first_loss"] == pytest.approx(math.log(2), abs=1e-5)
    gains = [logprobs_of(trainer, s).sum().item() - b for s, b in zip(samples, before, strict=True)]
    assert gains[0] > gains[1] and gains[2] > gains[3]
    margins = [0.1 * (gains[0] - gains[1]), 0.1 * (gains[2] - gains[3])]
    now = sum(math.log1p(math.exp(-margin)) for margin in margins) / 2
    assert now < metrics["last_loss"] < metrics["first_loss"]


@st.composite
def any_samples(draw: st.DrawFn) -> list[Sample]:
    """Sequences that may begin alike, with any tokens sampled."""
    begin = tuple(range(3, 3 + draw(st.integers(1, 30))))
    made = []
    for at in range(draw(st.integers(1, 5))):
        ids = begin + tuple(draw(st.lists(st.integers(0, 400), min_size=1, max_size=30)))
        mask = (False, *draw(st.lists(st.booleans(), min_size=len(ids) - 2, max_size=len(ids) - 2)), True)
        logprobs = tuple(-6.0 if sampled else 0.0 for sampled in mask)
        advantage = draw(st.sampled_from([-1.0, 0.5, 2.0]))
        made.append(
            Sample(trajectory_id=str(at % 3), leaf=0, input_ids=ids, mask=mask, logprobs=logprobs, advantage=advantage)
        )
    return made


@settings(max_examples=12, deadline=None, derandomize=True)
@given(any_samples(), st.integers(1, 120), st.sampled_from(["grpo", "gspo", "cispo", "reinforce++-baseline"]))
def test_packed_is_unpacked(model: Path, samples: list[Sample], tokens_per_pass: int, algorithm: str) -> None:
    results = []
    for limit in (1, tokens_per_pass):
        trainer = trainer_of(model, algorithm=algorithm, max_tokens_per_micro_batch=limit, learning_rate=1e-9)
        loss = trainer.reinforce(samples)["loss"]
        results.append((loss, {name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None}))
    # Unlikely tokens have large ratios, so that losses and gradients are compared relative to their size.
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5, abs=1e-5)
    largest = max(gradient.abs().max().item() for gradient in results[0][1].values())
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-5, atol=1e-5 * max(1.0, largest), msg=name)


def test_gradient_checkpointing_keeps_less_and_changes_nothing(model: Path) -> None:
    results, kept = [], []
    for checkpointing in (False, True):
        trainer = trainer_of(model, gradient_checkpointing=checkpointing)
        held: list[int] = []

        def hold(tensor: torch.Tensor, held: list[int] = held) -> torch.Tensor:
            held.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            trainer.reinforce(make_samples())
        kept.append(sum(held))
        results.append({name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None})
    assert kept[1] < 0.5 * kept[0]
    assert_same(results[0], results[1], 1e-6)
