"""A model of which every weight is trained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import copyfile

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import StorageError, TrainingError, describe
from openhands_rl_plugin.training.policies.full_layers import trained_token_logprobs
from openhands_rl_plugin.training.policies.fused import fuse_layers
from openhands_rl_plugin.training.policies.packed_model import PackedModel

_SHARD_BYTES = 4 * 1024**3
_INDEX = "model.safetensors.index.json"
_OWN_FILES = (".safetensors", ".bin", ".index.json")


class FullPolicy(PackedModel):
    """All weights, in float32 for the optimiser.

    A bfloat16 model computes with copies that are rounded after every step, and its gradients add up in float32: a
    step of a small learning rate would be rounded away otherwise.
    """

    def _prepare(self, settings: TrainingSettings) -> None:
        if not Path(self.model_path).is_dir():
            raise TrainingError(f"{self.model_path} is no directory: a whole model is trained from files, give theirs")
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
        """Bring the weights that the model computes with up to those of the optimiser."""
        if self.dtype == torch.float32:
            return
        with torch.no_grad():
            for name, parameter in self._base.named_parameters():
                parameter.copy_(self.parameters[name])

    def weights(self) -> dict[str, Tensor]:
        """Everything, under the names of the model's own files; weights that are tied are there once."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def set_weights(self, tensors: dict[str, Tensor], source: str) -> None:
        """Take over all weights. Raises ``TrainingError`` when names or shapes differ."""
        mine = {name: tuple(tensor.shape) for name, tensor in self.parameters.items()}
        if mine != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            raise TrainingError(f"{source} does not fit {self.model_path}; use the model it was trained from")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
        self.round()

    def save(self, directory: Path) -> None:
        """A model directory: the weights in the compute dtype, and the original's other files.

        Raises ``StorageError``.
        """
        try:
            for file in sorted(Path(self.model_path).iterdir()):
                if file.is_file() and not file.name.endswith(_OWN_FILES):
                    copyfile(file, directory / file.name)
            self._write(directory)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"the model cannot be written to {directory}: {describe(error)}") from error

    def _write(self, directory: Path) -> None:
        files = _files({name: parameter.numel() * self.dtype.itemsize for name, parameter in self.parameters.items()})
        weights = self.stored()
        for file, names in files.items():
            save_file({name: next(weights) for name in names}, directory / file, {"format": "pt"})
        if len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            total = sum(parameter.numel() for parameter in self.parameters.values()) * self.dtype.itemsize
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (directory / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def stored(self) -> Iterator[Tensor]:
        """Every trained weight whole, in the order of ``parameters``, as it is written into files."""
        for parameter in self.parameters.values():
            yield parameter.detach().to(self.dtype).cpu().contiguous()

    def _score(self, hidden: Tensor, targets: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor]:
        return trained_token_logprobs(hidden, targets, head.weight, head.bias)


def _files(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """The names in each file, no more of them than fit; ``sizes``: bytes of each tensor."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if used and used + size > _SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{at:05d}-of-{len(shards):05d}.safetensors": names for at, names in enumerate(shards, start=1)}


def _hand_over(master: nn.Parameter):
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        wide = parameter.grad.float()
        master.grad = wide if master.grad is None else master.grad.add_(wide)
        parameter.grad = None

    return hook
