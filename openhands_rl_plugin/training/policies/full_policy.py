"""Full fine-tuning: a model whose weights are all trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import StorageError, TrainingError, describe
from openhands_rl_plugin.models.adapters.store import LOADED, MANIFEST, PROBE, PROBED
from openhands_rl_plugin.training.distributed.sharding import full_tensor
from openhands_rl_plugin.training.policies.full_layers import trained_token_logprobs
from openhands_rl_plugin.training.policies.fused import fuse_layers
from openhands_rl_plugin.training.policies.packed_model import PackedModel

_SHARD_BYTES = 4 * 1024**3  # a size per file that every file system and hub accepts
_INDEX = "model.safetensors.index.json"
_OWN_FILES = (".safetensors", ".bin", ".index.json")
_OF_A_VERSION = frozenset({MANIFEST, PROBE, LOADED, PROBED, "trained.json"})
"""What was written beside the weights that training began with, about those."""


class FullPolicy(PackedModel):
    """All weights, in float32 for the optimiser.

    A bfloat16 model computes with rounded copies of the float32 master weights, and its gradients are accumulated in
    float32: otherwise a step with a small learning rate would be lost by rounding.
    """

    def _prepare(self, settings: TrainingSettings) -> None:
        if not Path(self.model_path).is_dir():
            raise TrainingError(f"{self.model_path} is not a directory: full fine-tuning needs the model's files")
        fuse_layers(self._base)
        self._base.requires_grad_(True)

    def _trained(self) -> dict[str, nn.Parameter]:
        own = dict(self._base.named_parameters())
        if self.dtype == torch.float32:
            return own
        masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in own.items()}
        for name, parameter in own.items():
            parameter.register_post_accumulate_grad_hook(_hand_over(masters[name]))
        return masters

    def round(self) -> None:
        """Copy the optimiser's weights, rounded, to those that the model computes with."""
        if self.dtype == torch.float32:
            return
        with torch.no_grad():
            for name, parameter in self._base.named_parameters():
                parameter.copy_(self.parameters[name])

    def weights(self) -> dict[str, Tensor]:
        """All weights, under the names in the model's files; tied weights are included once."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def set_weights(self, tensors: dict[str, Tensor], source: str) -> None:
        """Load all weights. Raises ``TrainingError`` when names or shapes differ."""
        mine = {name: tuple(tensor.shape) for name, tensor in self.parameters.items()}
        if mine != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            raise TrainingError(f"{source} does not fit {self.model_path}; use the model it was trained from")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
        self.round()

    def save(self, directory: Path) -> None:
        """Write a model directory: the weights in the compute dtype, and the original's other files.

        Raises ``StorageError``.
        """
        try:
            for file in sorted(Path(self.model_path).iterdir()):
                if file.is_file() and not file.name.endswith(_OWN_FILES) and file.name not in _OF_A_VERSION:
                    copyfile(file, directory / file.name)
            self._write(directory)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"the model cannot be written to {directory}: {describe(error)}") from error

    def _write(self, directory: Path) -> None:
        """Write the files of ``save_pretrained``, one tensor at a time.

        ``save_pretrained`` itself needs the whole state dict, for which a rank with sharded weights has no memory.
        """
        files = self._files()
        weights = self.stored()
        for file, names in files.filename_to_tensors.items():
            save_file({name: next(weights) for name in names}, directory / file, {"format": "pt"})
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
            (directory / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def _files(self) -> StateDictSplit:
        sizes = {name: parameter.numel() * self.dtype.itemsize for name, parameter in self.parameters.items()}
        return split_state_dict_into_shards_factory(
            sizes,
            get_storage_size=lambda size: size,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=_SHARD_BYTES,
        )

    def stored(self) -> Iterator[Tensor]:
        """Every trained weight whole, in the order of the files. A collective where the weights are sharded."""
        for names in self._files().filename_to_tensors.values():
            for name in names:
                yield full_tensor(self.parameters[name].detach().to(self.dtype)).cpu().contiguous()

    def _score_linear(
        self, hidden: Tensor, targets: Tensor, head: nn.Linear, temperatures: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return trained_token_logprobs(
            hidden, targets, head.weight, head.bias, temperatures, entropy_gradient=self._entropy_gradient
        )


def _hand_over(master: nn.Parameter):
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        wide = parameter.grad.float()
        master.grad = wide if master.grad is None else master.grad.add_(wide)
        parameter.grad = None

    return hook
