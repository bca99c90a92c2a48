"""Full fine-tuning: a model whose weights are all trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import StorageError, TrainingError, describe
from openhands_rl_plugin.models.adapters.store import LOADED, MANIFEST, PROBE, PROBED
from openhands_rl_plugin.training.distributed.ranks import full_tensor, local_shard, shard_all
from openhands_rl_plugin.training.losses.logprobs import ROWS_AT_A_TIME, entropy_slopes, next_token_logprobs
from openhands_rl_plugin.training.policies.packed_attention import PackedRows
from openhands_rl_plugin.training.policies.packed_model import PackedModel, fuse_layers


def trained_token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperatures: Tensor | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """As ``logprobs.token_logprobs``, but with gradients for ``weight`` and ``bias`` as well.

    Logits are in memory for ``ROWS_AT_A_TIME`` positions only. They are recomputed in the backward pass, because the
    gradient of the weights needs the gradient of the loss.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, targets, weight, bias, temperatures, entropy_gradient)
    return logprobs, entropies if entropy_gradient else entropies.detach()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperatures: Tensor | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for rows in _chunks(len(targets)):
            distribution = next_token_logprobs(hidden[rows], weight, bias, _part(temperatures, rows))
            logprobs[rows] = distribution.gather(1, targets[rows, None])[:, 0]
            entropies[rows] = -torch.linalg.vecdot(distribution.exp(), distribution)
        ctx.save_for_backward(hidden, targets, weight, bias, temperatures)
        ctx.entropy_gradient = entropy_gradient
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = grad_outputs
        hidden, targets, weight, bias, temperatures = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for rows in _chunks(len(targets)):
            own = _part(temperatures, rows)
            distribution = next_token_logprobs(hidden[rows], weight, bias, own)
            probabilities = distribution.exp()
            at = torch.arange(probabilities.shape[0], device=probabilities.device)
            slopes = -probabilities * grad_logprobs[rows, None]
            slopes[at, targets[rows]] += grad_logprobs[rows]
            if ctx.entropy_gradient:
                entropies = -torch.linalg.vecdot(probabilities, distribution)
                slopes += entropy_slopes(probabilities, distribution, entropies) * grad_entropies[rows, None]
            if own is not None:
                slopes /= own[:, None]
            if grad_bias is not None:
                grad_bias += slopes.sum(0)
            low = slopes.to(weight.dtype)
            grad_hidden[rows] = low @ weight
            grad_weight += low.t() @ hidden[rows]
        return (
            grad_hidden,
            None,
            grad_weight.to(weight.dtype),
            grad_bias.to(weight.dtype) if grad_bias is not None else None,
            None,
            None,
        )


def _part(temperatures: Tensor | None, rows: slice) -> Tensor | None:
    return None if temperatures is None else temperatures[rows]


def _chunks(count: int) -> list[slice]:
    return [slice(start, start + ROWS_AT_A_TIME) for start in range(0, count, ROWS_AT_A_TIME)]


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


class ShardedFullPolicy(FullPolicy):
    """Every rank keeps its shard of every weight and gradient, in float32. All ranks compute at the same time.

    Each rank first loads the whole model in the compute dtype, and then shards it.
    """

    _root: _Root | None = None

    @property
    def sharded(self) -> bool:
        """It is."""
        return True

    def _trained(self) -> dict[str, nn.Parameter]:
        self._root = _Root(self._base, super()._compute)
        shard_all(self._root, self._base, self.device, self.dtype)
        return dict(self._base.named_parameters())

    def round(self) -> None:
        """Nothing to do: shards are rounded whenever they are gathered."""

    def weights(self) -> dict[str, Tensor]:
        """This rank's shard of every weight, under the names in the model's files."""
        return {name: local_shard(parameter.detach()) for name, parameter in self.parameters.items()}

    def set_weights(self, tensors: dict[str, Tensor], source: str) -> None:
        """Load this rank's shards. Raises ``TrainingError`` when names or shapes differ."""
        mine = self.weights()
        shapes = ({name: tuple(each.shape) for name, each in parts.items()} for parts in (mine, tensors))
        if next(shapes) != next(shapes):
            raise TrainingError(f"{source} does not fit {self.model_path}; use the model it was trained from")
        with torch.no_grad():
            for name, part in mine.items():
                part.copy_(tensors[name])

    def _compute(
        self, packed: PackedRows, rows: Tensor, targets: Tensor, temperatures: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self._root is None:  # not sharded yet
            return super()._compute(packed, rows, targets, temperatures)
        return self._root(packed, rows, targets, temperatures)


class _Root(nn.Module):
    """Gathers the weights outside the layers in one unit: embedding and output layer may be tied."""

    def __init__(self, base: nn.Module, compute) -> None:
        super().__init__()
        self.base = base
        self._function = compute

    def forward(
        self, packed: PackedRows, rows: Tensor, targets: Tensor, temperatures: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As ``PackedModel._compute``."""
        return self._function(packed, rows, targets, temperatures)
