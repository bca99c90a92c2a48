"""What all layers of one pass share: a layout on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openhands_rl_plugin.training.data.layout import Layout
from openhands_rl_plugin.training.distributed.context_parallel import ContextGroup


class PackedRows:
    """A layout on a device, with the tensors that the attention of all layers shares.

    ``ids``, ``positions``: [1, N] of all rows. ``own_ids``, ``own_positions``: those of the rows that this process
    computes, which with a ``group`` are a part of them, with zeros where it is padded.
    """

    def __init__(self, layout: Layout, device: torch.device, group: ContextGroup | None = None) -> None:
        self.layout = layout
        self.group = group
        self.ids = torch.tensor([layout.ids], device=device)
        self.positions = torch.tensor([layout.positions], device=device)
        self.own_ids = _part(self.ids, group)
        self.own_positions = _part(self.positions, group)
        self._made: dict[Hashable, Any] = {}

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` made for the first layer that asked for ``name``."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def _part(values: Tensor, group: ContextGroup | None) -> Tensor:
    if group is None:
        return values
    rows = group.own(values.shape[1])
    found = values[:, rows.start : rows.stop]
    return F.pad(found, (0, len(rows) - found.shape[1]))
