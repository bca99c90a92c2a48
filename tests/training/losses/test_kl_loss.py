"""The KL term of the loss: its gradient, summed over every token that the old policy could have sampled."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openhands_rl_plugin.training.losses.losses import TokenBatch, kl_loss

STATES, VOCABULARY = 3, 7


def distributions(seed: int, stale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy, and the logprobs of the old policy and the reference: [states, vocabulary] each."""
    torch.manual_seed(seed)
    logits = torch.randn(STATES, VOCABULARY, dtype=torch.float64)
    old = torch.log_softmax(logits + stale * torch.randn_like(logits), -1)
    reference = torch.log_softmax(logits + torch.randn_like(logits), -1)
    return logits.requires_grad_(), old, reference


def exact(logits: Tensor, reference: Tensor) -> Tensor:
    """The gradient of KL(policy || reference), summed over the states."""
    logprobs = torch.log_softmax(logits, -1)
    (gradient,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    return gradient


def expected(logits: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """The mean gradient of the term over the tokens of the old policy, by enumeration."""
    logprobs = torch.log_softmax(logits, -1)
    sequence = torch.arange(STATES).repeat_interleave(VOCABULARY)
    batch = TokenBatch(logprobs.flatten(), old.flatten(), torch.zeros(STATES * VOCABULARY), sequence, STATES)
    losses = kl_loss(batch, reference.flatten())
    (gradient,) = torch.autograd.grad((old.exp().flatten() * losses).sum(), logits)
    return gradient


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), stale=st.sampled_from([0.0, 0.1, 0.7]))
def test_the_mean_gradient_is_that_of_the_divergence(seed: int, stale: float) -> None:
    logits, old, reference = distributions(seed, stale)
    mine = expected(logits, old, reference)
    torch.testing.assert_close(mine, exact(logits, reference), rtol=1e-9, atol=1e-12)


def test_a_ratio_that_overflows_stays_finite() -> None:
    values = torch.tensor([-1.0], requires_grad=True)
    batch = TokenBatch(values, torch.tensor([-500.0]), torch.ones(1), torch.zeros(1, dtype=torch.int64), 1)
    assert kl_loss(batch, torch.tensor([-1.5])).isfinite().all()
