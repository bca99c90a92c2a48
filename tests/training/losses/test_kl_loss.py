"""The KL term of the loss: its gradient, summed over every token that the old policy could have sampled."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.training.losses.objectives import TokenBatch, kl_loss

Kind = Literal["k1", "k2", "k3"]
KINDS: tuple[Kind, ...] = ("k1", "k2", "k3")
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


def expected(logits: Tensor, old: Tensor, reference: Tensor, kind: Kind, *, bias_correction: bool) -> Tensor:
    """The mean gradient of the term over the tokens of the old policy, by enumeration."""
    logprobs = torch.log_softmax(logits, -1)
    sequence = torch.arange(STATES).repeat_interleave(VOCABULARY)
    batch = TokenBatch(logprobs.flatten(), old.flatten(), torch.zeros(STATES * VOCABULARY), sequence, STATES)
    losses = kl_loss(batch, reference.flatten(), kind, bias_correction=bias_correction)
    (gradient,) = torch.autograd.grad((old.exp().flatten() * losses).sum(), logits)
    return gradient


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), stale=st.sampled_from([0.0, 0.1, 0.7]), kind=st.sampled_from(KINDS))
def test_the_mean_gradient_is_that_of_the_divergence(seed: int, stale: float, kind: Kind) -> None:
    logits, old, reference = distributions(seed, stale)
    mine = expected(logits, old, reference, kind, bias_correction=True)
    torch.testing.assert_close(mine, exact(logits, reference), rtol=1e-9, atol=1e-12)


def test_without_the_correction_k1_is_noise_and_k3_the_other_divergence() -> None:
    logits, old, reference = distributions(3, 0.0)
    found = {kind: expected(logits, old, reference, kind, bias_correction=False) for kind in KINDS}
    assert found["k1"].abs().max() < 1e-12
    torch.testing.assert_close(found["k2"], exact(logits, reference))
    (forward,) = torch.autograd.grad(-(reference.exp() * torch.log_softmax(logits, -1)).sum(), logits)
    torch.testing.assert_close(found["k3"], forward)
    assert not torch.allclose(found["k3"], exact(logits, reference), rtol=0.1)


def test_a_ratio_that_overflows_stays_finite() -> None:
    values = torch.tensor([-1.0], requires_grad=True)
    batch = TokenBatch(values, torch.tensor([-500.0]), torch.ones(1), torch.zeros(1, dtype=torch.int64), 1)
    assert kl_loss(batch, torch.tensor([-1.5]), "k3").isfinite().all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kl": "k1"}, "the gradient of k1 in the loss is then noise"),
        ({"kl": "k3", "kl_in": "reward"}, 'has no effect where kl_in = "reward"'),
        ({}, "kl_bias_correction = false has no effect"),
    ],
)
def test_the_correction_is_left_out_only_where_that_makes_sense(changes: dict[str, str], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TrainingSettings.model_validate({"algorithm": "grpo", "kl_bias_correction": False, **changes})
    TrainingSettings.model_validate({"algorithm": "grpo", "kl_bias_correction": False, "kl": "k3"})
