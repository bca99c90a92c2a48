"""What all layers of one pass share: a layout on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from openhands_rl_plugin.training.data.layout import Layout
from openhands_rl_plugin.training.distributed.context_parallel import ContextGroup


class PackedRows:
    """A layout on a device, with the tensors that the attention of all layers shares.

    With a ``group``, ``ids`` and ``positions`` are those of this rank's rows, with zeros where they are padding.
    """

    def __init__(self, layout: Layout, device: torch.device, group: ContextGroup | None = None) -> None:
        self.layout = layout
        self.group = group
        self.ids = torch.tensor([_own(layout.ids, group)], device=device)
        self.positions = torch.tensor([_own(layout.positions, group)], device=device)
        self._made: dict[Hashable, Any] = {}

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` made for the first layer that asked for ``name``."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def _own(values: tuple[int, ...], group: ContextGroup | None) -> tuple[int, ...]:
    if group is None:
        return values
    rows = group.own(len(values))
    found = values[rows.start : rows.stop]
    return found + (0,) * (len(rows) - len(found))
