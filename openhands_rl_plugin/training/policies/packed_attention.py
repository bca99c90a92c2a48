"""Runs a causal language model over a ``Layout``: no padding, shared prefixes computed once, sequences isolated."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface

from openhands_rl_plugin.training.policies.attention_in_blocks import attention_in_blocks
from openhands_rl_plugin.training.policies.packed_rows import PackedRows

ATTENTION_NAME = "openhands_rl_packed"
UNKNOWN = "its attention has score caps or sinks"


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
    None). N: the layout's rows, or this rank's part of them.
    """
    if s_aux is not None:
        raise ValueError(UNKNOWN)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def inner(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention_of(query, key, value, rows, scale, sliding_window, softcap)

    if rows.group is None:
        return inner(query, key, value), None
    return rows.group.attention(inner, query, key, value, len(rows.layout.ids)), None


def attention_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    scaling: float,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of all rows of a layout, as the device computes it.

    query: [1, heads, N, dim]; key: [1, kv_heads, N, dim]; value: [1, kv_heads, N, own dim] -> [1, N, heads, own dim].
    ``softcap``: scores become ``softcap * tanh(score / softcap)``. Raises ``ValueError`` where the device has no way to
    compute that.
    """
    if query.is_cuda:
        from openhands_rl_plugin.training.policies.attention_on_cuda import attention_on_cuda  # loads torch's compiler

        return attention_on_cuda(query, key, value, rows, scaling, window, softcap)
    if softcap is not None:
        raise ValueError(UNKNOWN)
    return attention_in_blocks(query, key, value, rows, scaling, window)


AttentionInterface.register(ATTENTION_NAME, attend)
