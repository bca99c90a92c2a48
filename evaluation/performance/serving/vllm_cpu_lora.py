"""A plugin for vLLM on a processor: LoRA as one matrix product for each adapter of a batch. For tests and figures only.

vLLM's reference operations gather the adapter's weights once for every token. Loaded into vLLM's own environment
through the entry point ``vllm.general_plugins``; see ``vllm_server.py``. It imports nothing of this project.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Rows = Tensor | slice


def register() -> None:
    """Replace the operations. Called by every process of vLLM, possibly more than once."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink = shrink
        module.bgmv_expand = expand
        module.bgmv_expand_slice = expand_slice


def shrink(inputs: Tensor, weights: Tensor, output: Tensor, adapters: Tensor, scaling: float = 1.0) -> None:
    """``output = scaling * inputs A^T``; inputs: [N, in], weights: [adapters, 1, rank, in], output: [N, rank]."""
    output.zero_()
    for rows, weight in _each(weights, adapters, output.dtype):
        product = torch.mm(inputs[rows].to(output.dtype), weight.t())
        output[rows, : product.shape[1]] = product * scaling


def expand(inputs: Tensor, weights: Tensor, output: Tensor, adapters: Tensor, add_inputs: bool = True) -> None:
    """``output += inputs B^T``; inputs: [N, rank], weights: [adapters, 1, out, rank], output: [N, out]."""
    expand_slice(inputs, weights, output, adapters, 0, weights.shape[-2], add_inputs)


def expand_slice(
    inputs: Tensor, weights: Tensor, output: Tensor, adapters: Tensor, start: int, size: int, add_inputs: bool = True
) -> None:
    """As ``expand``, into ``size`` columns from ``start``."""
    part = output[:, start : start + size]
    if not add_inputs:
        part.zero_()
    for rows, weight in _each(weights, adapters, output.dtype):
        product = torch.mm(inputs[rows].to(output.dtype), weight.t())
        columns = min(product.shape[1], part.shape[1])
        part[rows, :columns] += product[:, :columns]


def _each(weights: Tensor, adapters: Tensor, dtype: torch.dtype) -> Iterator[tuple[Rows, Tensor]]:
    """The rows and the weights of every adapter; a row of the base model has -1 and is left alone."""
    present = adapters.unique().tolist()
    for index in present:
        if index < 0:
            continue
        weight = weights[index].to(dtype)
        rows = slice(None) if len(present) == 1 else (adapters == index).nonzero().flatten()
        yield rows, weight.squeeze(0) if weight.dim() == 3 else weight
