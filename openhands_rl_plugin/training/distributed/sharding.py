"""A model in pieces: every rank keeps its part of each layer and fetches the rest when the layer is used (FSDP2).

Under an adapter the base's layers alone are split: the adapter stays whole on every rank, being small, so that
checkpoints, optimiser and publishing are the same as without; embedding, last normalisation and output layer stay
whole. Of a model whose every weight is trained, everything is split, gradients and the optimiser's moments too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from openhands_rl_plugin.core.errors import TrainingError, describe


def is_sharded(setting: Literal["auto", "none", "layers"], environ: Mapping[str, str] | None = None) -> bool:
    """Whether the layers are to be split; ``auto``: where ``accelerate launch`` was told to use FSDP.

    Raises ``TrainingError`` for a process that has nobody to share with.
    """
    if group.is_initialized():
        known = os.environ if environ is None else environ
        return setting == "layers" or (setting == "auto" and known.get("ACCELERATE_USE_FSDP", "") == "true")
    if setting == "layers":
        raise TrainingError('sharding = "layers" needs several processes: start with torchrun or accelerate launch')
    return False


def shard_layers(base: nn.Module, trained: Iterable[nn.Parameter], device: torch.device) -> None:
    """Split the frozen weights of every layer of ``base`` among the ranks; ``trained`` parameters stay whole.

    Raises ``TrainingError`` for an architecture whose layers are not known, or that cannot be split.
    """
    mesh = init_device_mesh(device.type, (group.get_world_size(),))
    whole = set(trained)
    with _told(base):
        for layer in _layers(base):
            fully_shard(layer, mesh=mesh, ignored_params=whole)


def shard_all(root: nn.Module, base: nn.Module, device: torch.device, compute: torch.dtype) -> None:
    """Split every weight of ``root``, which calls ``base``, among the ranks, as float32; products are in ``compute``.

    Gradients are added up over the ranks, in float32, and split in the same way. A layer is widened when its turn
    comes, so that no rank ever has the whole model in float32. Raises ``TrainingError`` as ``shard_layers`` does.
    """
    mesh = init_device_mesh(device.type, (group.get_world_size(),))
    policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    with _told(base):
        for module in (*_layers(base), root):
            for parameter in module.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.float()
            split = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            assert isinstance(split, FSDPModule)
            # Tokens are weighed in the whole batch: gradients are to be added up. Gloo cannot scale while it adds.
            split.set_gradient_divide_factor(1.0)
            split.set_force_sum_reduction_for_comms(True)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is split; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is split, put together on every rank, which all have to call; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_as(tensor: Tensor, part: Tensor) -> Tensor:
    """``part`` as this rank's part of a tensor that is split as ``tensor`` is; of any other, ``part`` beside it."""
    if not isinstance(tensor, DTensor):
        return part.to(tensor.device)
    made = torch.zeros_like(tensor, requires_grad=False)
    own_part(made).copy_(part)
    return made


def _layers(base: nn.Module) -> list[nn.Module]:
    layers: list[nn.Module] = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise TrainingError(f'{type(base).__name__} has no layers that could be split; set sharding = "none"')
    return layers


@contextmanager
def _told(base: nn.Module) -> Iterator[None]:
    try:
        yield
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise TrainingError(
            f'the layers of {type(base).__name__} cannot be split: {describe(error)}; set sharding = "none"'
        ) from error
