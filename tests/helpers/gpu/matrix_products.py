"""The matrix products of a call, with their dtypes, as PyTorch's profiler sees them: also in backward passes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

_PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv"}
_LOWER = ("c10::BFloat16", "c10::Half")


@dataclass(frozen=True)
class Product:
    """``shapes`` and ``types`` of its matrices."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]

    @property
    def in_float32(self) -> bool:
        """Whether a sum over more than one product is made of float32 factors: an outer product has none."""
        return self.shapes[-2][-1] > 1 and any(each not in _LOWER for each in self.types)


def matrix_products(call: Callable[[], object]) -> list[Product]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        call()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    made = []
    for event in events:
        if event.get("name") in _PRODUCTS and "Input Dims" in event.get("args", {}):
            dims, types = event["args"]["Input Dims"], event["args"]["Input type"]
            matrices = [at for at, shape in enumerate(dims) if shape][-2:]
            shapes = tuple(tuple(dims[at]) for at in matrices)
            made.append(Product(event["name"], shapes, tuple(types[at] for at in matrices)))
    return made
