"""Data-parallel training: every rank computes a shard of each optimiser step, and all end with the same weights.

``torchrun`` or ``accelerate launch`` starts the processes and sets the usual environment variables. Every rank holds
the samples, the adapter's weights and the optimiser, and draws the same batches; only the micro-batches of a batch are
sharded. A token's weight is that in the whole batch, so the sum of all ranks' gradients is the gradient of one
process. Only rank 0 writes files and talks to servers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.training.losses import TrainingSample, micro_batches

_TIMEOUT = timedelta(days=1)
"""Long, because the other ranks wait while rank 0 scores episodes or writes a model. When a process dies, the launcher
ends all of them."""


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """The processes that train together. Every method but ``shard`` is a collective: all ranks must call it.

    ``rank``: the number of this process, from 0; ``size``: that of processes (the world size). Tensors of collectives
    are on ``device``.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in place. All tensors have one dtype.

        In one message, because the weights of an adapter are many and small.
        """
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self.device)
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def broadcast[T](self, value: T) -> T:
        """The value of rank 0; that of other ranks is ignored."""
        found = [value]
        if self.size > 1:
            dist.broadcast_object_list(found, src=0, device=self.device)
        return found[0]

    def assert_equal(self, what: str, digest: str) -> None:
        """Raise ``TrainingError`` unless all ranks have the same ``digest`` of ``what``."""
        differing = torch.tensor(float(self.broadcast(digest) != digest))
        self.all_reduce([differing])
        if count := int(differing.item()):
            raise TrainingError(
                f"{count} of {self.size} ranks have other {what} than rank 0; give all of them the same store, model, "
                "adapters and options, on a file system that all nodes share"
            )

    def shard[T](self, values: Sequence[T]) -> tuple[list[T], list[T]]:
        """Every ``size``-th value, and padding, which repeats the first one and is computed with weight zero.

        With the padding all ranks compute equally many, which sharded weights need: fetching them is a collective.
        """
        mine = list(values[self.rank :: self.size])
        return mine, list(values[:1]) * (-(-len(values) // self.size) - len(mine))


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the process group that a launcher has started until the block ends; one process without a launcher.

    On GPUs each process uses the device of its ``LOCAL_RANK``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=_TIMEOUT)
    try:
        assert state.device is not None
        yield current_ranks(state.device)
    finally:
        state.destroy_process_group()


def current_ranks(device: torch.device) -> Ranks:
    """The process group that this process has joined, or this process alone."""
    return Ranks(dist.get_rank(), dist.get_world_size(), device) if dist.is_initialized() else Ranks()


def shard_micro_batches(
    ranks: Ranks, items: Sequence[TrainingSample], max_tokens: int, *, whole_units: bool
) -> tuple[list[list[TrainingSample]], list[list[TrainingSample]]]:
    """The micro-batches of this rank's shard and its padding (see ``Ranks.shard``), the longest first, to balance."""
    tokens = sum(len(item.sample.input_ids) for item in items)
    made = micro_batches(items, min(max_tokens, -(-tokens // ranks.size)), whole_units=whole_units)
    if ranks.size > 1:
        made.sort(key=lambda group: -sum(len(item.sample.input_ids) for item in group))
    return ranks.shard(made)


def all_reduce_metrics(ranks: Ranks, loss: float, sums: dict[str, float]) -> tuple[float, dict[str, float]]:
    """The loss and the ``SUMS`` over all ranks."""
    values = torch.tensor([loss, *sums.values()], dtype=torch.float64)
    ranks.all_reduce([values])
    loss, *rest = values.tolist()
    return loss, dict(zip(sums, rest, strict=True))


def is_sharded(setting: Literal["auto", "none", "layers"]) -> bool:
    """Whether to shard the layers; ``auto``: where ``accelerate launch`` was configured with FSDP.

    Raises ``TrainingError`` for ``"layers"`` in a single process.
    """
    if dist.is_initialized():
        return setting == "layers" or (setting == "auto" and os.environ.get("ACCELERATE_USE_FSDP", "") == "true")
    if setting == "layers":
        raise TrainingError('sharding = "layers" needs several processes: start with torchrun or accelerate launch')
    return False


def shard_layers(base: nn.Module, trained: Iterable[nn.Parameter], device: torch.device) -> None:
    """Shard the frozen weights of every layer of ``base`` over the ranks; ``trained`` parameters stay whole.

    Raises ``TrainingError`` for an architecture whose layers are unknown.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = set(trained)
    for layer in _layers(base):
        fully_shard(layer, mesh=mesh, ignored_params=whole)


def shard_all(base: nn.Module, device: torch.device, compute: torch.dtype) -> None:
    """Shard every weight of ``base`` over the ranks, in float32; ``compute`` is the dtype of matrix products.

    Gradients are summed over the ranks in float32 (reduce-scatter). A layer is converted when it is sharded, so no
    rank ever has the whole model in float32. Raises ``TrainingError`` as ``shard_layers`` does.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    for module in (*_layers(base), base):
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(sharded, FSDPModule)
        # Token weights are those in the whole batch, so gradients are summed. Gloo cannot scale while it sums.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on every rank (a collective); any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """``shard`` as this rank's shard of a tensor that is sharded as ``tensor`` is; else ``shard`` on its device."""
    if not isinstance(tensor, DTensor):
        return shard.to(tensor.device)
    made = torch.zeros_like(tensor, requires_grad=False)
    local_shard(made).copy_(shard)
    return made


def _layers(base: nn.Module) -> list[nn.Module]:
    layers: list[nn.Module] = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise TrainingError(f'{type(base).__name__} has no layers that could be sharded; set sharding = "none"')
    return layers
