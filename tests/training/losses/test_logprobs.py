"""What is watched while training, and the logprob function against plain autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.training.losses.losses import (
    ROWS_AT_A_TIME,
    TokenBatch,
    diagnose,
    ppo,
    token_logprobs,
)
from openhands_rl_plugin.training.policies.packed_model import scaled_token_logprobs

pytestmark = pytest.mark.contract


def batch_of(count: int = 31) -> TokenBatch:
    torch.manual_seed(0)
    old = -torch.rand(count) * 2
    advantages = torch.tensor([1.2, -0.8, 0.5, -1.5, 0.0, 0.7]).repeat(6)[:count]
    return TokenBatch(old + torch.randn(count) * 0.5, old, advantages, torch.arange(count) // 6, 6)


def watched(batch: TokenBatch) -> dict[str, float]:
    ratio = torch.exp(batch.logprobs - batch.old)
    return diagnose(batch, -batch.old, ratio=ratio, low=0.2, high=0.28)


def test_the_clip_share_is_that_of_tokens_without_a_gradient() -> None:
    batch = batch_of()
    logprobs = batch.logprobs.clone().requires_grad_()
    ppo(replace(batch, logprobs=logprobs), low=0.2, high=0.28).sum().backward()
    assert logprobs.grad is not None
    cut = ((logprobs.grad == 0) & (batch.advantages != 0)).float().mean().item()
    assert watched(batch)["clip_share"] == pytest.approx(cut * 31)
    assert 0 < cut < 1


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_gradient_of_the_entropy_is_that_of_plain_autograd(with_bias: bool) -> None:
    torch.manual_seed(2)
    count = ROWS_AT_A_TIME + 5
    hidden, weight = torch.randn(count, 12, requires_grad=True), torch.randn(50, 12, requires_grad=True)
    bias = torch.randn(50, requires_grad=True) if with_bias else None
    targets, scale, bonus = torch.randint(50, (count,)), torch.randn(count), torch.rand(count)
    heat = 0.5 + torch.rand(count)
    inputs = [hidden, weight, *([bias] if bias is not None else [])]

    expected = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / heat[:, None], -1)
    entropy = -(expected.exp() * expected).sum(-1)
    plain = (expected.gather(1, targets[:, None])[:, 0] * scale - 0.3 * bonus * entropy).sum()
    logprobs, entropies = scaled_token_logprobs(hidden, targets, weight, bias, heat, entropy_gradient=True)
    mine = (logprobs * scale - 0.3 * bonus * entropies).sum()
    for found, wanted in zip(torch.autograd.grad(mine, inputs), torch.autograd.grad(plain, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    _, watched = token_logprobs(hidden, targets, weight.detach())
    assert not watched.requires_grad, "without a bonus the entropy is watched only"


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), with_bias=st.booleans(), head_is_trained=st.booleans())
def test_at_a_temperature_they_are_those_of_the_divided_logits(
    seed: int, with_bias: bool, head_is_trained: bool
) -> None:
    torch.manual_seed(seed)
    count = ROWS_AT_A_TIME + 5
    hidden, weight = torch.randn(count, 6, requires_grad=True), torch.randn(30, 6, requires_grad=True)
    bias = torch.randn(30, requires_grad=True) if with_bias else None
    targets, scale = torch.randint(30, (count,)), torch.randn(count)
    temperatures = 0.2 + 2 * torch.rand(count)
    given_to = [hidden, weight, *([bias] if bias is not None else [])] if head_is_trained else [hidden]

    expected = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperatures[:, None], -1)
    chosen = expected.gather(1, targets[:, None])[:, 0]
    slopes = torch.autograd.grad((chosen * scale).sum(), given_to)

    if head_is_trained or bias is not None:
        logprobs, entropies = scaled_token_logprobs(hidden, targets, weight, bias, temperatures)
    else:
        logprobs, entropies = token_logprobs(hidden, targets, weight, temperatures)
    mine = torch.autograd.grad((logprobs * scale).sum(), given_to)
    torch.testing.assert_close(logprobs, chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(-1), rtol=1e-4, atol=1e-5)
    for gradient, slope in zip(mine, slopes, strict=True):
        torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-4)
