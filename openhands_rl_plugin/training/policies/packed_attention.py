"""Runs a causal language model over a ``Layout``: no padding, shared prefixes computed once, sequences isolated."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from openhands_rl_plugin.training.data.layout import Layout


class PackedRows:
    """A layout on a device, with the tensors that the attention of all layers shares.

    ``ids``, ``positions``: [1, N].
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.ids = torch.frombuffer(bytearray(layout.ids), dtype=torch.int32)[None].to(device, torch.int64)
        self.positions = torch.tensor([layout.positions], device=device)
        self._made: dict[Hashable, Any] = {}

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` made for the first layer that asked for ``name``."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


PLAIN_KEYS = 256
"""Up to so many keys plain products are as fast as the fused kernel, and rounded as transformers' own are. The memory
for their weights grows with the square of the length."""


def attention_of_runs(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float, window: int | None
) -> Tensor:
    """Torch's own attention, run by run: each attends to itself and to what is before it in its sequences.

    query: [1, heads, N, dim]; key: [1, kv_heads, N, dim]; value: [1, kv_heads, N, own dim] -> [1, N, heads, own dim].
    """
    runs = rows.layout.runs
    lengths = [run.stop - run.start for run in runs]
    queries, keys, values = (each.split(lengths, dim=2) for each in (query, key, value))
    found = []
    for run, length, own in zip(runs, lengths, queries, strict=True):
        chain = [at for at, other in enumerate(runs) if other.start <= run.start < other.end]
        seen = [torch.cat([parts[at] for at in chain], dim=2) for parts in (keys, values)]
        mask = None
        if run.depth or (window is not None and window < length):
            mask = rows.once((run.depth, length, window), partial(_mask, run.depth, length, window, rows.ids.device))
        causal, fused = mask is None, run.depth + length > PLAIN_KEYS
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if fused else SDPBackend.MATH):
            found.append(sdpa(own, *seen, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True))
    return torch.cat(found, dim=2).transpose(1, 2)


def _mask(depth: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, depth + length] booleans: what the tokens of a run see of those before them and of the run."""
    at, to = torch.arange(depth, depth + length, device=device)[:, None], torch.arange(depth + length, device=device)
    return to <= at if window is None else (to <= at) & (to > at - window)


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
        wide = query.float(), key.float(), value.float()  # faster than bfloat16 with a mask
        return attention_of_runs(*wide, rows, scale, sliding_window).to(query.dtype), None
    whole = sliding_window is None or len(rows.layout.ids) <= sliding_window
    if softcap is None and whole and len(rows.layout.runs) == 1:  # one sequence: flash
        found = sdpa_attention_forward(module, query, key, value, None, scaling=scale, is_causal=True)[0]
    else:
        mask: BlockMask = rows.once(("mask", sliding_window), lambda: block_mask(rows, sliding_window))
        found = flex_attention_forward(module, query, key, value, mask, scaling=scale, softcap=softcap)[0]
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
