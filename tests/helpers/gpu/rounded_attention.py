"""Attention whose products have the factors that a GPU's tensor cores have: what of a difference is rounding."""

from __future__ import annotations

import torch
from packed_layouts import attends
from torch import Tensor

from openhands_rl_plugin.training.data.layout import Layout


def _bfloat16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).float()


def _tf32(tensor: Tensor) -> Tensor:
    """With the last 13 bits cut off: tensor cores do not round float32 factors."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def rounded(layout: Layout, inputs: list[Tensor], scaling: float, window: int | None) -> list[Tensor]:
    """The output and the gradients of queries, keys and values, as FlashAttention computes them (arXiv 2307.08691,
    algorithms 1 and 2), for the gradient of ``with_gradients``."""
    dtype = inputs[0].dtype
    factor = _bfloat16 if dtype == torch.bfloat16 else _tf32
    query, key, value = (each.detach().float() for each in inputs)
    kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]

    def product(left: Tensor, right: Tensor) -> Tensor:
        return factor(left) @ factor(right)

    def of_keys(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (kv_heads, group)).sum(2)

    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    hidden = ~attends(layout, window)
    weights = (product(query, keys.transpose(2, 3)) * scaling).masked_fill(hidden, float("-inf")).softmax(-1)
    output = product(weights, values).to(dtype)
    torch.manual_seed(1)
    outer = torch.randn(output.transpose(1, 2).shape).to(dtype).float().transpose(1, 2)
    of_rows = (output.float() * outer).sum(-1, keepdim=True)
    scores = weights * (product(outer, values.transpose(2, 3)) - of_rows)
    gradients = (
        product(scores, keys) * scaling,
        of_keys(product(scores.transpose(2, 3), query)) * scaling,
        of_keys(product(weights.transpose(2, 3), outer)),
    )
    return [output.transpose(1, 2).float(), *(each.to(dtype).float() for each in gradients)]
