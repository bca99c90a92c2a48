"""The frozen base model in pieces: every rank keeps its part of each layer and fetches the rest when the layer is used.

FSDP2 (``fully_shard``) holds the base's weights; those of the adapter stay whole on every rank, being small. So
checkpoints, optimiser and publishing are the same as without. Embedding, last normalisation and output layer stay
whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
import torch.distributed as group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from openhands_rl_plugin.errors import TrainingError, describe


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
    layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise TrainingError(f'{type(base).__name__} has no layers that could be split; set sharding = "none"')
    mesh = init_device_mesh(device.type, (group.get_world_size(),))
    whole = set(trained)
    try:
        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=whole)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise TrainingError(
            f'the layers of {type(base).__name__} cannot be split: {describe(error)}; set sharding = "none"'
        ) from error
