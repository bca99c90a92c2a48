"""What was freed in small pieces is given back to the system, and kernels of few shapes are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openhands_rl_plugin.core.memory import return_freed_memory

MEGABYTE = 1024 * 1024
PRODUCTS = """
import sys
from pathlib import Path
import torch
from openhands_rl_plugin.core.memory import bound_compiled_kernels
def multiply(first, last):
    with torch.inference_mode():
        for rows in range(first, last):
            torch.nn.functional.linear(torch.zeros(rows, 64, dtype=torch.bfloat16), weight)
    return int(Path("/proc/self/statm").read_text().split()[1]) >> 8
if sys.argv[1]:
    bound_compiled_kernels()
torch.set_num_threads(1)
weight = torch.zeros(64, 64, dtype=torch.bfloat16)
before = multiply(1, 200)
print(multiply(200, 900) - before)
"""
"""The megabytes that products of 700 other sizes take."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and only glibc has the call")
def test_freed_pieces_are_returned() -> None:
    pieces = [bytearray(64 * 1024) for _ in range(1600)]
    kept = pieces[-1]  # at the top of the heap, so that nothing below it shrinks by itself
    before = resident_bytes()
    del pieces
    return_freed_memory()
    assert before - resident_bytes() > 50 * MEGABYTE
    assert len(kept) == 64 * 1024


@pytest.mark.skipif(
    sys.platform != "linux" or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="needs /proc and native bfloat16",
)
def test_products_of_many_sizes_take_no_more_and_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)
    bounded, all_kept = (
        int(subprocess.run([sys.executable, "-c", PRODUCTS, bound], capture_output=True, check=True, text=True).stdout)
        for bound in ("bound", "")
    )
    assert bounded < 40 < all_kept


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
