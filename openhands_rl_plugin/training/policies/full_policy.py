"""Full fine-tuning: a model whose weights are all trained, whole or sharded over the ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import StorageError, TrainingError, describe
from openhands_rl_plugin.models.adapters.store import MANIFEST, PROBE, PROBED
from openhands_rl_plugin.training.distributed.ranks import full_tensor, is_sharded, local_shard, shard_all
from openhands_rl_plugin.training.policies.packed_model import PackedModel, fuse_layers

_SHARD_BYTES = 4 * 1024**3  # a size per file that every file system and hub accepts
_OWN_FILES = (".safetensors", ".bin", ".index.json")
_OF_A_VERSION = frozenset({MANIFEST, PROBE, PROBED, "trained.json"})
"""Files in a version's folder that describe its own weights, and so are not copied to the next version."""


class FullPolicy(PackedModel):
    """All weights, in float32 for the optimiser.

    A bfloat16 model computes with rounded copies of the float32 master weights, and its gradients are accumulated in
    float32: otherwise a step with a small learning rate would be lost by rounding. Sharded, every rank keeps its shard
    of every weight and gradient, and all compute at the same time; each first loads the whole model in the compute
    dtype.
    """

    def _prepare(self, settings: TrainingSettings) -> None:
        if settings.kl != "none":
            raise TrainingError(
                'full fine-tuning keeps no base model: set [rl.training] kl = "none", or method = "lora"'
            )
        fuse_layers(self._base)
        self._base.requires_grad_(True)
        self.sharded = is_sharded(settings.sharding)

    def _trained(self) -> dict[str, nn.Parameter]:
        if self.sharded:
            shard_all(self._base, self.device, self.dtype)
            # The embedding and the output layer, which may be tied, are gathered with the base as one unit.
            base: Any = self._base
            base.packed_logprobs = self._compute
            register_fsdp_forward_method(base, "packed_logprobs")
            self._compute = base.packed_logprobs
        own = dict(self._base.named_parameters())
        if self.sharded or self.dtype == torch.float32:
            return own
        masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in own.items()}
        for name, parameter in own.items():
            parameter.register_post_accumulate_grad_hook(_hand_over(masters[name]))
        return masters

    @torch.no_grad()
    def round(self) -> None:
        """Copy the optimiser's weights, rounded, to those that the model computes with; FSDP does so by itself."""
        if not self.sharded and self.dtype != torch.float32:
            for name, parameter in self._base.named_parameters():
                parameter.copy_(self.parameters[name])

    def weights(self) -> dict[str, Tensor]:
        """All weights, or this rank's shard of each, under the names in the model's files; tied ones once."""
        return {name: local_shard(parameter.detach()) for name, parameter in self.parameters.items()}

    def set_weights(self, tensors: dict[str, Tensor], source: str) -> None:
        """Load the result of ``weights``. Raises ``TrainingError`` when names or shapes differ."""
        mine = self.weights()
        shapes = [{name: tuple(each.shape) for name, each in parts.items()} for parts in (mine, tensors)]
        if shapes[0] != shapes[1]:
            raise TrainingError(f"{source} does not fit {self.model_path}; use the model it was trained from")
        for name, part in mine.items():
            part.copy_(tensors[name])
        self.round()

    def save(self, directory: Path) -> None:
        """Write a model directory: the weights in the compute dtype, and the original's other files.

        Where the weights are sharded, the other ranks call ``hand_over`` meanwhile. Raises ``StorageError``.
        """
        try:
            for file in sorted(Path(self.model_path).iterdir()):
                if file.is_file() and not file.name.endswith(_OWN_FILES) and file.name not in _OF_A_VERSION:
                    copyfile(file, directory / file.name)
            save_torch_state_dict(dict(self.whole()), directory, max_shard_size=_SHARD_BYTES)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"the model cannot be written to {directory}: {describe(error)}") from error

    def hand_over(self) -> None:
        """Send this rank's shard of the weights to rank 0."""
        for _ in self.whole() if self.sharded else ():
            pass

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole, on the CPU, with its name. A collective where the weights are sharded."""
        for name, parameter in self.parameters.items():
            yield name, full_tensor(parameter.detach().to(self.dtype)).cpu().contiguous()


def _hand_over(master: nn.Parameter):
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        wide = parameter.grad.float()
        master.grad = wide if master.grad is None else master.grad.add_(wide)
        parameter.grad = None

    return hook
