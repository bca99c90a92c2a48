"""Sharded weights (torch's FSDP2): every rank keeps a shard of each layer and gathers the rest when the layer runs.

With an adapter only the base model's layers are sharded. The adapter is small and stays whole on every rank, so
checkpoints, optimiser and publishing are the same as without sharding; embedding, last normalisation and output layer
stay whole too. With full fine-tuning everything is sharded, gradients and optimiser state too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from openhands_rl_plugin.core.errors import TrainingError, describe


def is_sharded(setting: Literal["auto", "none", "layers"], environ: Mapping[str, str] | None = None) -> bool:
    """Whether to shard the layers; ``auto``: where ``accelerate launch`` was configured with FSDP.

    Raises ``TrainingError`` for ``"layers"`` in a single process.
    """
    if dist.is_initialized():
        known = os.environ if environ is None else environ
        return setting == "layers" or (setting == "auto" and known.get("ACCELERATE_USE_FSDP", "") == "true")
    if setting == "layers":
        raise TrainingError('sharding = "layers" needs several processes: set nproc_per_node, or start with torchrun')
    return False


def shard_layers(base: nn.Module, trained: Iterable[nn.Parameter], device: torch.device) -> None:
    """Shard the frozen weights of every layer of ``base`` over the ranks; ``trained`` parameters stay whole.

    Raises ``TrainingError`` for an architecture whose layers are unknown or cannot be sharded.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = set(trained)
    with _sharding_errors(base):
        for layer in _layers(base):
            fully_shard(layer, mesh=mesh, ignored_params=whole)


def shard_all(root: nn.Module, base: nn.Module, device: torch.device, compute: torch.dtype) -> None:
    """Shard every weight of ``root``, which calls ``base``, in float32; ``compute`` is the dtype of matrix products.

    Gradients are summed over the ranks in float32 (reduce-scatter). A layer is converted when it is sharded, so no
    rank ever has the whole model in float32. Raises ``TrainingError`` as ``shard_layers`` does.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    with _sharding_errors(base):
        for module in (*_layers(base), root):
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


@contextmanager
def _sharding_errors(base: nn.Module) -> Iterator[None]:
    try:
        yield
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise TrainingError(
            f'the layers of {type(base).__name__} cannot be sharded: {describe(error)}; set sharding = "none"'
        ) from error
