"""Attention of a packed layout on a GPU: flash for a single sequence, FlexAttention for several."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.training.policies.attention_in_blocks import attention_in_blocks
from openhands_rl_plugin.training.policies.kernel_check import Heads, problem_of_kernel
from openhands_rl_plugin.training.policies.packed_rows import PackedRows
from openhands_rl_plugin.training.policies.visible_blocks import BLOCK, VisibleBlocks, visible_blocks

logger = logging.getLogger(__name__)

NARROWEST = 16
"""Width of a head below which its kernels have no matrix product."""

KERNELS = 64
"""Kernels that a process may compile: one for each width and number of heads, dtype, scale, and with or without
gradients. Beyond torch's own limit of 8 it would compute all scores at once, without a word."""


def attention_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """query: [1, heads, N, dim]; key: [1, kv_heads, N, dim]; value: [1, kv_heads, N, own dim] -> [1, N, heads, own
    dim].

    ``softcap``: scores become ``softcap * tanh(score / softcap)``. Raises ``ValueError`` where that cannot be computed.
    """
    if softcap is None and _is_causal(rows, window) and _has_flash(query, key, value):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return found.transpose(1, 2)
    problem = _problem(query.shape[1], key.shape[1], query.shape[3], value.shape[3], query.dtype, scaling, softcap)
    if not problem:
        blocks = visible_blocks(rows, window)
        return flexible_attention(query, key, value, blocks, scaling, softcap).transpose(1, 2)
    if softcap is not None:
        raise ValueError(f"its attention has score caps, and {problem}")
    return attention_in_blocks(query, key, value, rows, scaling, window)


def flexible_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: VisibleBlocks, scaling: float, softcap: float | None = None
) -> Tensor:
    """FlexAttention of N rows: [1, heads, N, dim], ... -> [1, heads, N, own dim]."""
    count, own = query.shape[2], value.shape[3]
    inputs = [_padded(each, blocks.rows) for each in (query, key, value)]
    # One kernel for all numbers of rows.
    for each in inputs:
        torch._dynamo.maybe_mark_dynamic(each, 2)
    for each in blocks:
        for at, size in enumerate(each.shape):
            if size > 1:
                torch._dynamo.maybe_mark_dynamic(each, at)
    return _compiled(scaling, softcap)(*inputs, blocks)[:, :, :count, :own]


def flex_attention_of(scaling: float, softcap: float | None) -> Callable[..., Tensor]:
    """The function of queries, keys, values and ``VisibleBlocks`` that is compiled."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, at: Tensor, to: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    def attention(query: Tensor, key: Tensor, value: Tensor, blocks: VisibleBlocks) -> Tensor:
        ends, positions, befores = blocks.ends, blocks.positions, blocks.befores

        def visible(batch: Tensor, head: Tensor, at: Tensor, to: Tensor) -> Tensor:
            return (to <= at) & (at < ends[to]) & (positions[to] > befores[at])

        # Made in here: the numbers of rows in it stay those of the tensors, whatever they are.
        mask = BlockMask(
            seq_lengths=(query.shape[2], query.shape[2]),
            kv_num_blocks=blocks.keys,
            kv_indices=blocks.key_places,
            full_kv_num_blocks=blocks.full_keys,
            full_kv_indices=blocks.full_key_places,
            q_num_blocks=blocks.queries,
            q_indices=blocks.query_places,
            full_q_num_blocks=blocks.full_queries,
            full_q_indices=blocks.full_query_places,
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=visible,
        )
        # Rows are whole blocks, which cannot be seen from numbers that are not known yet.
        options: Any = {"IS_DIVISIBLE": True}
        found = flex_attention(
            query,
            key,
            value,
            score_mod=None if softcap is None else capped,
            block_mask=mask,
            scale=scaling,
            enable_gqa=True,
            kernel_options=options,
        )
        assert isinstance(found, Tensor)
        return found

    return attention


@cache
def _compiled(scaling: float, softcap: float | None) -> Callable[..., Tensor]:
    torch._dynamo.config.recompile_limit = max(KERNELS, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention_of(scaling, softcap), fullgraph=True)


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """With rows of zeros up to ``rows``, and heads of the narrowest width at least, which changes no score."""
    wider, more = max(0, NARROWEST - tensor.shape[3]), rows - tensor.shape[2]
    return F.pad(tensor, (0, wider, 0, more)) if wider or more else tensor


def _is_causal(rows: PackedRows, window: int | None) -> bool:
    return len(rows.layout.runs) == 1 and (window is None or len(rows.layout.ids) <= window)


def _has_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, True))


@cache
def _problem(
    heads: int, kv_heads: int, dim: int, own: int, dtype: torch.dtype, scaling: float, softcap: float | None
) -> str:
    """Why FlexAttention is of no use for these heads here, in one clause; empty when it is. Logged once."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        return flexible_attention(query, key, value, visible_blocks(rows, None), scaling, softcap).transpose(1, 2)

    try:
        # Hooks of gradient checkpointing around this call must not see these tensors.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
            wrong = problem_of_kernel(
                kernel, Heads(heads, kv_heads, dim, own, dtype, scaling, softcap), torch.device("cuda")
            )
        problem = wrong and f"FlexAttention computes other numbers here: {wrong}"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ImportError, OSError, AssertionError, ValueError) as error:
        problem = f"FlexAttention cannot be compiled here: {describe(error)}"
    if problem:
        logger.warning("%s; attention is computed by plain matrix products, several times slower", problem)
    return problem
