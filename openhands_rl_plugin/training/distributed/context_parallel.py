"""Context parallelism: the ranks of a group compute one micro-batch together, each a part of its rows (tokens).

All layers but the attention compute a row from that row alone. Around the attention an all-to-all gives every rank all
rows of a part of the heads, and gives the rows back after it: the way of DeepSpeed Ulysses (Jacobs et al. 2023, arXiv
2309.14509). So the attention of a layout is the same as of one process, and every rank's gradient is that of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from openhands_rl_plugin.core.errors import TrainingError

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query: [1, heads, N, dim]; key, value: [1, kv_heads, N, ...] -> [1, N, heads, own dim]."""


class ContextGroup:
    """``size`` ranks that follow each other, so that they are on one machine where they can be.

    ``rank``: the number of this process among them. Raises ``TrainingError`` unless ``size`` divides the processes.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % size:
            raise TrainingError(
                f"context_parallel_size = {size} needs a multiple of {size} processes, and there "
                f"{'is' if world == 1 else 'are'} {world}: set nproc_per_node to one, or start so many with torchrun"
            )
        mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("data", "context"))
        self._group = mesh.get_group("context")
        self.size = size
        self.rank = mesh.get_local_rank("context")

    def own(self, count: int) -> range:
        """This rank's part of ``count`` rows. All parts have the same length, so the last ones are padded."""
        each = -(-count // self.size)
        return range(self.rank * each, (self.rank + 1) * each)

    def attention(self, inner: Attention, query: Tensor, key: Tensor, value: Tensor, count: int) -> Tensor:
        """The attention of own rows, by ``inner``, which computes all ``count`` rows of a part of the heads.

        query: [1, heads, n, dim]; key, value: [1, kv_heads, n, ...] -> [1, n, heads, own dim]. Key heads that are fewer
        than the ranks are copied. Raises ``ValueError`` where the heads cannot be shared.
        """
        heads, kv_heads = query.shape[1], key.shape[1]
        copies = math.lcm(kv_heads, self.size) // kv_heads
        if heads % (kv_heads * copies):
            raise ValueError(f"its {heads} heads (of {kv_heads} keys) cannot be shared by {self.size} processes evenly")
        if copies > 1:
            key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
        whole = _RowsToHeads.apply(self, count, query, key, value)
        return _HeadsToRows.apply(inner(*whole), self, query.shape[2])

    def sum_of_parts(self, part: Tensor, places: Tensor, count: int) -> Tensor:
        """[count, ...] on all ranks: this one's ``part`` at ``places`` ([K]), those of the others at theirs.

        Every rank is meant to compute the same loss of it; the gradient of a part reaches the rank that gave it.
        """
        return _SumOfParts.apply(part, places, count, self)

    def all_rows(self, values: Tensor, count: int) -> Tensor:
        """[count, ...] of all ranks' own rows ([n, ...])."""
        own = self.own(count)
        places = torch.arange(count, device=values.device)[own.start : own.stop]
        return self.sum_of_parts(values[: len(places)], places, count)

    def rows_to_heads(self, values: Tensor, count: int) -> Tensor:
        """[1, heads, n, dim] of own rows -> [1, heads / size, count, dim]. A collective."""
        sent = values[0].unflatten(0, (self.size, -1)).transpose(1, 2).contiguous()
        return self._exchanged(sent).flatten(0, 1)[:count].transpose(0, 1)[None]

    def heads_to_rows(self, values: Tensor, each: int) -> Tensor:
        """[1, heads / size, count, dim] -> [1, heads, each, dim] of own rows, zeros where they are padding. A
        collective."""
        rows = values[0].transpose(0, 1)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, each * self.size - len(rows)))
        found = self._exchanged(padded.contiguous().unflatten(0, (self.size, each)))
        return found.transpose(0, 1).flatten(1, 2).transpose(0, 1)[None]

    def all_reduce(self, values: Tensor) -> None:
        """Sum over the ranks of the group, in place."""
        dist.all_reduce(values, group=self._group)

    def _exchanged(self, sent: Tensor) -> Tensor:
        """[size, ...]: what each rank had for this one, of what it ``sent``."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received


def context_group(size: int, device: torch.device) -> ContextGroup | None:
    """The group of this process, or ``None`` for a size of 1. A collective. Raises ``TrainingError``."""
    return None if size == 1 else ContextGroup(size, device)


class _RowsToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.each = group, tensors[0].shape[2]
        return tuple(group.rows_to_heads(tensor, count) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(grad_outputs, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(ctx.group.heads_to_rows(grad, ctx.each) if need else None for grad, need in wanted)


class _HeadsToRows(torch.autograd.Function):
    """[1, count, heads / size, dim] -> [1, each, heads, dim]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ContextGroup, each: int) -> Tensor:
        ctx.group, ctx.count = group, values.shape[1]
        return group.heads_to_rows(values.transpose(1, 2), each).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.rows_to_heads(grad_outputs[0].transpose(1, 2), ctx.count).transpose(1, 2), None, None


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, places: Tensor, count: int, group: ContextGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = part.new_zeros((count, *part.shape[1:]))
        whole[places] = part
        group.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad_outputs[0][places], None, None, None
