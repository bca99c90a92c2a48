"""What all layers of one pass share: a layout on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from openhands_rl_plugin.training.data.layout import Layout


class PackedRows:
    """A layout on a device, with the tensors that the attention of all layers shares.

    ``ids``, ``positions``: [1, N].
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.ids = torch.tensor([layout.ids], device=device)
        self.positions = torch.tensor([layout.positions], device=device)
        self._made: dict[Hashable, Any] = {}

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` made for the first layer that asked for ``name``."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]
