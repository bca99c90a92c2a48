"""Losses and gradients against the golden values of verl, TRL and OpenRLHF."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from openhands_rl_plugin.training.losses.losses import (
    TokenBatch,
    cispo,
    fixed_length,
    gspo,
    ppo,
    rollout_mean,
    token_mean,
)

pytestmark = pytest.mark.contract

ROWS, WIDTH = 6, 8
LENGTHS = [8, 6, 3, 1, 5, 8]
ADVANTAGES = [1.2, -0.8, 0.5, -1.5, 0.0, 0.7]


def golden_batch() -> TokenBatch:
    """The batch that the published values were computed on, as its sampled tokens."""
    torch.manual_seed(0)
    old = -torch.rand(ROWS, WIDTH) * 2
    new = old + torch.randn(ROWS, WIDTH) * 0.5
    mask = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]
    advantages = torch.tensor(ADVANTAGES)[:, None].expand(ROWS, WIDTH)
    sequence = torch.arange(ROWS)[:, None].expand(ROWS, WIDTH)
    return TokenBatch(
        logprobs=new[mask].requires_grad_(),
        old=old[mask],
        advantages=advantages[mask],
        sequence=sequence[mask],
        sequences=ROWS,
    )


LENGTHS_OF = torch.tensor(LENGTHS, dtype=torch.float32)
sequence_mean = partial(rollout_mean, rollout=torch.arange(ROWS))
CLIP = {"low": 0.2, "high": 0.28}


@pytest.mark.parametrize(
    ("objective", "weights", "loss", "norm"),
    [
        (partial(ppo, **CLIP), token_mean, -0.193785, 0.181162),
        (partial(ppo, **CLIP), sequence_mean, 0.056191, 0.148957),
        (partial(ppo, **CLIP), partial(fixed_length, longest=WIDTH, rollouts=ROWS), -0.125153, 0.117000),
        (partial(gspo, **CLIP), sequence_mean, -0.063641, 0.123891),
        (partial(cispo, **CLIP), token_mean, 0.323623, 0.156387),
        (partial(cispo, low=None, high=0.28), token_mean, 0.332744, 0.148872),
        (partial(cispo, low=None, high=-0.72), token_mean, 0.092596, 0.042634),
    ],
    ids=["PPO, DAPO", "GRPO", "Dr. GRPO", "GSPO", "CISPO verl", "CISPO TRL", "CISPO cap 0.28"],
)
def test_losses_and_gradients_are_the_published_ones(
    objective: Callable[[TokenBatch], Tensor], weights: Callable[[Tensor], Tensor], loss: float, norm: float
):
    batch = golden_batch()
    total = (weights(LENGTHS_OF)[batch.sequence] * objective(batch)).sum()
    total.backward()
    assert total.item() == pytest.approx(loss, abs=1.1e-6)
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.norm().item() == pytest.approx(norm, abs=1.1e-6)


def test_on_policy_every_objective_has_the_gradient_of_reinforce():
    for objective in (ppo, gspo, cispo):
        values = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
        advantages = torch.tensor([1.0, 1.0, -2.0])
        batch = TokenBatch(values, values.detach().clone(), advantages, torch.tensor([0, 0, 1]), 2)
        objective(batch).sum().backward()
        assert torch.allclose(values.grad, -advantages), objective.__name__


def test_weights_of_a_batch_sum_to_one_and_do_not_depend_on_how_it_is_cut():
    lengths = LENGTHS_OF
    for weights in (token_mean, partial(rollout_mean, rollout=torch.tensor([0, 0, 1, 1, 1, 2]))):
        assert (weights(lengths) * lengths).sum().item() == pytest.approx(1.0)
    of_rollout = rollout_mean(lengths, torch.tensor([0, 0, 1, 1, 1, 2])) * lengths
    assert [of_rollout[:2].sum().item(), of_rollout[2:5].sum().item(), of_rollout[5].item()] == pytest.approx(
        [1 / 3] * 3
    )
