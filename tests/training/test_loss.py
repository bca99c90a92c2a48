"""Losses against golden values of other implementations, and the logprob function against plain autograd."""

from __future__ import annotations

import pytest
import torch

from openhands_rl_plugin.training.loss import ROWS_AT_A_TIME, Diagnostics, diagnose, policy_losses, token_logprobs


def golden_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The case that verl (dual clip off), OpenRLHF's ``PolicyLoss`` and TRL's ``dapo`` agree on."""
    torch.manual_seed(0)
    lengths = torch.tensor([8, 6, 3, 1, 5, 8])
    old = -torch.rand(6, 8) * 2
    new = (old + torch.randn(6, 8) * 0.5).requires_grad_()
    advantages = torch.tensor([1.2, -0.8, 0.5, -1.5, 0.0, 0.7])[:, None].expand(6, 8)
    return new, old, advantages, torch.arange(8)[None] < lengths[:, None]


def test_token_mean_of_the_clipped_loss_is_that_of_verl_openrlhf_and_trl() -> None:
    new, old, advantages, mask = golden_case()
    losses = policy_losses(new[mask], old[mask], advantages[mask], clip_low=0.2, clip_high=0.28)
    loss = losses.sum() / mask.sum()
    loss.backward()
    assert loss.item() == pytest.approx(-0.193785, abs=1e-6)
    assert new.grad is not None
    assert new.grad.norm().item() == pytest.approx(0.181162, abs=1e-6)


def test_diagnostics_of_passes_add_up_to_those_of_the_batch() -> None:
    new, old, advantages, mask = golden_case()
    tensors = [tensor[mask] for tensor in (new, old, advantages, -old)]
    whole = diagnose(*tensors, clip_low=0.2, clip_high=0.28)
    parts = Diagnostics()
    for part in (slice(0, 5), slice(5, 18), slice(18, None)):
        parts += diagnose(*(tensor[part] for tensor in tensors), clip_low=0.2, clip_high=0.28)
    assert whole.tokens == parts.tokens == 31
    for name in ("ratio", "approx_kl", "clip_share", "entropy"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-5)
    ratio = torch.exp(tensors[0] - tensors[1])
    assert whole.approx_kl == pytest.approx((ratio - 1 - ratio.log()).mean().item(), rel=1e-5)
    assert 0 < whole.clip_share < 1


def test_the_clip_cuts_gradients_only_on_the_far_side() -> None:
    new = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    policy_losses(new, torch.zeros(4), advantages, clip_low=0.2, clip_high=0.28).sum().backward()
    assert new.grad is not None
    assert (new.grad != 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("with_bias", [False, True])
def test_logprobs_entropies_and_gradients_are_those_of_plain_autograd(with_bias: bool) -> None:
    torch.manual_seed(1)
    count = 2 * ROWS_AT_A_TIME + 3
    hidden = torch.randn(count, 12, requires_grad=True)
    weight, targets = torch.randn(50, 12), torch.randint(50, (count,))
    bias = torch.randn(50) if with_bias else None
    scale = torch.randn(count)

    expected = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias), -1)
    chosen = expected.gather(1, targets[:, None])[:, 0]
    (slope,) = torch.autograd.grad((chosen * scale).sum(), hidden)

    logprobs, entropies = token_logprobs(hidden, targets, weight, bias)
    (mine,) = torch.autograd.grad((logprobs * scale).sum(), hidden)
    torch.testing.assert_close(logprobs, chosen)
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(-1))
    torch.testing.assert_close(mine, slope, rtol=1e-4, atol=1e-5)


def test_logprobs_without_gradient() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(7, 4)
    logprobs, _ = token_logprobs(hidden, torch.tensor([0, 1, 2]), weight)
    assert not logprobs.requires_grad
