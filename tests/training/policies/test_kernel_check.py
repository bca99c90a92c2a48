"""A kernel that computes another attention, or other gradients, is found before it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packed_layouts import plain
from torch import Tensor

from openhands_rl_plugin.training.policies.attention_in_blocks import attention_in_blocks
from openhands_rl_plugin.training.policies.kernel_check import Heads, problem_of_kernel
from openhands_rl_plugin.training.policies.packed_rows import PackedRows

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 32, 24, torch.float32, 0.2)


def in_blocks(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
    return attention_in_blocks(query, key, value, rows, HEADS.scaling, None)


class Scaled(torch.autograd.Function):
    """A backward pass that is wrong by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_processors_compute_is_right(dtype: torch.dtype) -> None:
    assert problem_of_kernel(in_blocks, HEADS._replace(dtype=dtype), CPU) == ""


def test_score_caps_are_compared_too() -> None:
    capped = HEADS._replace(softcap=2.0)

    def kernel(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        return plain(rows.layout, [query, key, value], capped.scaling, None, capped.softcap)

    assert problem_of_kernel(kernel, capped, CPU) == ""
    assert problem_of_kernel(in_blocks, capped, CPU).startswith("its output differs by")


def test_a_kernel_that_does_not_know_the_sequences_is_found() -> None:
    def causal(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=HEADS.scaling, enable_gqa=True)
        return found.transpose(1, 2)

    assert problem_of_kernel(causal, HEADS, CPU).startswith("its output differs by")


@pytest.mark.parametrize(("at", "name"), enumerate(("queries", "keys", "values")))
@pytest.mark.parametrize("factor", [1.2, float("nan")])
def test_wrong_gradients_are_found_by_name(at: int, name: str, factor: float) -> None:
    def kernel(*given: Any) -> Tensor:
        inputs = [Scaled.apply(each, factor) if number == at else each for number, each in enumerate(given[:3])]
        return in_blocks(*inputs, given[3])

    assert problem_of_kernel(kernel, HEADS, CPU).startswith(f"its gradient of {name} differs by")
