"""Runs a causal language model over a ``Layout``: no padding, shared prefixes computed once, sequences isolated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from openhands_rl_plugin.training.data.layout import Layout, Run


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


BLOCK = 128
"""Queries per matrix product; keys after a block's last query are skipped: nearly half of a causal product."""

KEEP_KEYS = 256
"""Attention weights over at most so many keys are saved for the backward pass; longer ones are recomputed, because the
memory for them grows with the square of the length."""


@dataclass(frozen=True)
class _Block:
    """Query rows ``start:stop``, and the number of their run's keys that the last of them attends to."""

    start: int
    stop: int
    keys: int


def attention_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float, window: int | None
) -> Tensor:
    """query: [1, heads, N, dim]; key: [1, kv_heads, N, dim]; value: [1, kv_heads, N, own dim] -> [1, N, heads, own
    dim]."""
    heads, count, dim = query.shape[1:]
    kv_heads = key.shape[1]
    # Query heads that share keys (GQA) become neighbouring rows of one matrix product, so that no key is copied.
    grouped = query[0].view(kv_heads, heads // kv_heads, count, dim).transpose(1, 2)
    output = _PackedAttention.apply(
        grouped.contiguous(), key[0].contiguous(), value[0].contiguous(), rows, scaling, window
    )
    return output.transpose(0, 1).reshape(1, count, heads, value.shape[-1])


def _key_slices_of(rows: PackedRows) -> tuple[tuple[slice, ...], ...]:
    return rows.once("key_slices", lambda: tuple(_key_slices(rows.layout, run) for run in rows.layout.runs))


def _bias(rows: PackedRows, block: _Block, heads: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[queries x heads, columns] of 0 and -inf, for the last columns of the block's scores.

    Without a sliding window only the block's own tokens can be in the future, so it has these columns only.
    """
    count = block.stop - block.start
    columns = count if window is None or block.keys <= window else block.keys

    def made() -> Tensor:
        query = torch.arange(columns - count, columns, device=rows.ids.device)[:, None]
        at = torch.arange(columns, device=rows.ids.device)[None]
        hidden = at > query if window is None else (at > query) | (at <= query - window)
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=rows.ids.device)
        return zeros.masked_fill_(hidden, float("-inf")).repeat_interleave(heads, 0)

    return rows.once(("bias", count, columns, heads, window, dtype), made)


def _key_slices(layout: Layout, run: Run) -> tuple[slice, ...]:
    """The rows that ``run`` attends to, first token first, as few slices as possible."""
    slices = [slice(run.start, run.stop)]
    while run.parent is not None:
        run = layout.runs[run.parent]
        if run.stop == slices[0].start:
            slices[0] = slice(run.start, slices[0].stop)
        else:
            slices.insert(0, slice(run.start, run.stop))
    return tuple(slices)


def _blocks(run: Run) -> Iterator[_Block]:
    for start in range(run.start, run.stop, BLOCK):
        stop = min(run.stop, start + BLOCK)
        yield _Block(start, stop, run.depth + stop - run.start)


def _gather(tensor: Tensor, slices: tuple[slice, ...]) -> Tensor:
    parts = [tensor[:, rows] for rows in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _scatter_add(tensor: Tensor, slices: tuple[slice, ...], values: Tensor) -> None:
    start = 0
    for rows in slices:
        length = rows.stop - rows.start
        tensor[:, rows] += values[:, start : start + length]
        start += length


def _weights(queries: Tensor, scaled_keys: Tensor, block: _Block, bias: Tensor) -> Tensor:
    scores = torch.bmm(queries.to(scaled_keys.dtype), scaled_keys[:, : block.keys].transpose(1, 2))
    scores[:, :, block.keys - bias.shape[1] :] += bias
    return torch.softmax(scores, dim=-1).to(queries.dtype)


class _PackedAttention(torch.autograd.Function):
    """query: [kv_heads, N, heads a key, dim]; key: [kv_heads, N, dim]; value: [kv_heads, N, own dim] -> [kv_heads, N,
    heads a key, own dim].

    Scores and their softmax are float32, as in fused kernels. Plain matrix products beat torch's fused CPU kernel here
    (2.4 times, forward and backward together, for 450 tokens of 9 heads in bfloat16 on a Zen 5 core).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float, window: int | None
    ) -> Tensor:
        kv_heads, count, heads, _ = query.shape
        output = query.new_empty(kv_heads, count, heads, value.shape[-1])
        kept: list[Tensor] = []
        for run, slices in zip(rows.layout.runs, _key_slices_of(rows), strict=True):
            scaled_keys, values = _gather(key, slices).to(torch.float32) * scale, _gather(value, slices)
            for block in _blocks(run):
                bias = _bias(rows, block, heads, window, scaled_keys.dtype)
                weights = _weights(_rows(query, block), scaled_keys, block, bias)
                attended = torch.bmm(weights, values[:, : block.keys])
                output[:, block.start : block.stop] = attended.view(kv_heads, -1, heads, value.shape[-1])
                if block.keys <= KEEP_KEYS and any(ctx.needs_input_grad):
                    kept.append(weights)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.rows, ctx.scale, ctx.window = rows, scale, window
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        query, key, value, *kept = ctx.saved_tensors
        rows, scale = ctx.rows, ctx.scale
        grad = grad.contiguous()
        remaining = iter(kept)
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for run, slices in zip(rows.layout.runs, _key_slices_of(rows), strict=True):
            gathered, values = _gather(key, slices), _gather(value, slices)
            scaled = gathered * scale
            run_grad_key, run_grad_value = torch.zeros_like(gathered), torch.zeros_like(values)
            for block in _blocks(run):
                seen, own = slice(0, block.keys), slice(block.start, block.stop)
                queries, outer = _rows(query, block), _rows(grad, block)
                if block.keys <= KEEP_KEYS:
                    weights = next(remaining)
                else:
                    keys = gathered.to(torch.float32) * scale
                    bias = _bias(rows, block, query.shape[2], ctx.window, keys.dtype)
                    weights = _weights(queries, keys, block, bias)
                run_grad_value[:, seen] += torch.bmm(weights.transpose(1, 2), outer)
                grad_weights = torch.bmm(outer, values[:, seen].transpose(1, 2))
                grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
                grad_query[:, own] = torch.bmm(grad_scores, scaled[:, seen]).view(grad_query[:, own].shape)
                run_grad_key[:, seen] += torch.bmm(grad_scores.transpose(1, 2), queries)
            _scatter_add(grad_key, slices, run_grad_key)
            _scatter_add(grad_value, slices, run_grad_value)
        return grad_query, grad_key.mul_(scale), grad_value, None, None, None


def _rows(tensor: Tensor, block: _Block) -> Tensor:
    """[kv_heads, queries x heads, dim] of a block, as a view."""
    return tensor[:, block.start : block.stop].flatten(1, 2)


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
