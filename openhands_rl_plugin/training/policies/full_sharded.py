"""Full fine-tuning with sharded weights (FSDP2): no rank holds the whole model in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.training.distributed.sharding import local_shard, shard_all
from openhands_rl_plugin.training.policies.full_policy import FullPolicy
from openhands_rl_plugin.training.policies.packed_rows import PackedRows


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
