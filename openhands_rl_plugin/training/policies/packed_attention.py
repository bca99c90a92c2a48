"""Runs a causal language model over a ``Layout``: no padding, shared prefixes computed once, sequences isolated."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from openhands_rl_plugin.training.policies.attention_in_blocks import attention_in_blocks
from openhands_rl_plugin.training.policies.packed_rows import PackedRows

ATTENTION_NAME = "openhands_rl_packed"
UNKNOWN = "its attention has score caps or sinks"
KERNELS = 64
"""Kernels of FlexAttention that a process may compile: one for each width and number of heads, dtype and scale."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: PackedRows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    query: [1, heads, N, dim]; key: [1, kv_heads, N, dim]; value: [1, kv_heads, N, own dim] -> ([1, N, heads, own dim],
    None). ``softcap``: scores become ``softcap * tanh(score / softcap)``. Raises ``ValueError`` where the device has no
    way to compute that.
    """
    if s_aux is not None or (softcap is not None and not query.is_cuda):
        raise ValueError(UNKNOWN)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not query.is_cuda:
        return attention_in_blocks(query, key, value, rows, scale, sliding_window), None
    whole = sliding_window is None or len(rows.layout.ids) <= sliding_window
    if softcap is None and whole and len(rows.layout.runs) == 1:  # one sequence: flash
        found, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scale, is_causal=True)
    else:
        mask: BlockMask = rows.once(("mask", sliding_window), lambda: block_mask(rows, sliding_window))
        found, _ = flex_attention_forward(module, query, key, value, mask, scaling=scale, softcap=softcap)
    return found, None


def block_mask(rows: PackedRows, window: int | None) -> BlockMask:
    """FlexAttention's mask of a layout: a token attends to those of its own sequence up to it, or in its ``window``."""
    # Beyond torch's own limit of 8 kernels it would compute all scores at once, without a word.
    torch._dynamo.config.recompile_limit = max(KERNELS, torch._dynamo.config.recompile_limit)
    device, count = rows.ids.device, len(rows.layout.ids)
    lengths = torch.tensor([run.stop - run.start for run in rows.layout.runs], device=device)
    ends = torch.tensor([run.end for run in rows.layout.runs], device=device).repeat_interleave(lengths)
    positions = rows.positions[0]

    def visible(batch: Tensor, head: Tensor, at: Tensor, to: Tensor) -> Tensor:
        own = (to <= at) & (at < ends[to])
        return own if window is None else own & (positions[to] > positions[at] - window)

    return create_block_mask(visible, None, None, count, count, device=str(device), _compile=device.type == "cuda")


AttentionInterface.register(ATTENTION_NAME, attend)
