"""Losses against the published values of verl, TRL and OpenRLHF, and logprobs against plain autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import make_samples
from torch import Tensor

from openhands_rl_plugin.training.losses import (
    ROWS_AT_A_TIME,
    TokenBatch,
    batches,
    cispo,
    fixed_length,
    gspo,
    kl_loss,
    ppo,
    rollout_mean,
    samples_from_rollouts,
    token_logprobs,
    token_mean,
)
from openhands_rl_plugin.training.policies.packed_model import scaled_token_logprobs

pytestmark = pytest.mark.contract

ROWS, WIDTH = 6, 8
LENGTHS = torch.tensor([8, 6, 3, 1, 5, 8], dtype=torch.float32)
ADVANTAGES = [1.2, -0.8, 0.5, -1.5, 0.0, 0.7]
CLIP = {"low": 0.2, "high": 0.28}
sequence_mean = partial(rollout_mean, rollout=torch.arange(ROWS))


def golden_batch() -> TokenBatch:
    """The batch that the published values were computed on, as its sampled tokens."""
    torch.manual_seed(0)
    old = -torch.rand(ROWS, WIDTH) * 2
    new = old + torch.randn(ROWS, WIDTH) * 0.5
    mask = torch.arange(WIDTH)[None] < LENGTHS[:, None]
    advantages = torch.tensor(ADVANTAGES)[:, None].expand(ROWS, WIDTH)
    sequence = torch.arange(ROWS)[:, None].expand(ROWS, WIDTH)
    return TokenBatch(new[mask].requires_grad_(), old[mask], advantages[mask], sequence[mask], ROWS)


@pytest.mark.parametrize(
    ("objective", "weights", "loss", "norm"),
    [
        (partial(ppo, **CLIP), token_mean, -0.193785, 0.181162),
        (partial(ppo, **CLIP), sequence_mean, 0.056191, 0.148957),
        (partial(ppo, **CLIP), partial(fixed_length, longest=WIDTH, rollouts=ROWS), -0.125153, 0.117000),
        (partial(gspo, **CLIP), sequence_mean, -0.063641, 0.123891),
        (partial(cispo, **CLIP), token_mean, 0.323623, 0.156387),
        (partial(cispo, low=None, high=0.28), token_mean, 0.332744, 0.148872),
    ],
    ids=["PPO, DAPO", "GRPO", "Dr. GRPO", "GSPO", "CISPO verl", "CISPO TRL"],
)
def test_losses_and_gradients_are_the_published_ones(
    objective: Callable[[TokenBatch], Tensor], weights: Callable[[Tensor], Tensor], loss: float, norm: float
) -> None:
    batch = golden_batch()
    total = (weights(LENGTHS)[batch.sequence] * objective(batch)).sum()
    total.backward()
    assert total.item() == pytest.approx(loss, abs=1.1e-6)
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.norm().item() == pytest.approx(norm, abs=1.1e-6)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), stale=st.sampled_from([0.0, 0.1, 0.7]))
def test_the_mean_gradient_of_the_kl_term_is_that_of_the_divergence(seed: int, stale: float) -> None:
    """Summed over every token that the old policy could have sampled in three states."""
    torch.manual_seed(seed)
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    old = torch.log_softmax(logits.detach() + stale * torch.randn_like(logits), -1)
    reference = torch.log_softmax(logits.detach() + torch.randn_like(logits), -1)
    logprobs = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    sequence = torch.arange(3).repeat_interleave(7)
    batch = TokenBatch(logprobs.flatten(), old.flatten(), torch.zeros(21), sequence, 3)
    (mine,) = torch.autograd.grad((old.exp().flatten() * kl_loss(batch, reference.flatten())).sum(), logits)
    torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.booleans(), st.booleans(), st.booleans())
def test_logprobs_and_gradients_are_those_of_plain_autograd(
    seed: int, with_bias: bool, head_is_trained: bool, with_bonus: bool
) -> None:
    torch.manual_seed(seed)
    count = ROWS_AT_A_TIME + 5
    hidden, weight = torch.randn(count, 6, requires_grad=True), torch.randn(30, 6, requires_grad=True)
    bias = torch.randn(30, requires_grad=True) if with_bias else None
    targets, factors = torch.randint(30, (count,)), torch.randn(count)
    temperatures = 0.2 + 2 * torch.rand(count)
    bonus = 0.3 * torch.rand(count) if with_bonus else torch.zeros(count)
    inputs = [hidden, weight, *([bias] if bias is not None else [])] if head_is_trained else [hidden]

    plain = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperatures[:, None], -1)
    chosen, entropy = plain.gather(1, targets[:, None])[:, 0], -(plain.exp() * plain).sum(-1)
    if head_is_trained or with_bias or with_bonus:
        given_to = hidden, targets, weight, bias, temperatures
        logprobs, entropies = scaled_token_logprobs(*given_to, entropy_gradient=with_bonus)
    else:
        logprobs, entropies = token_logprobs(hidden, targets, weight, temperatures)
    torch.testing.assert_close(logprobs, chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, entropy, rtol=1e-4, atol=1e-5)
    assert entropies.requires_grad == with_bonus
    found, wanted = (
        torch.autograd.grad((each * factors - bonus * spread).sum(), inputs)
        for each, spread in ((logprobs, entropies), (chosen, entropy))
    )
    for gradient, slope in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-4)


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 3))
def test_every_rollout_is_in_one_batch_of_an_epoch(count: int, size: int, epochs: int) -> None:
    items = samples_from_rollouts(make_samples(count))
    made = batches(items, size=size, epochs=epochs, seed="3:0")
    assert made == batches(items, size=size, epochs=epochs, seed="3:0")
    assert Counter(id(item) for batch in made for item in batch) == {id(item): epochs for item in items}
    assert max(map(len, made)) <= size and len(made) == epochs * -(-count // size)
