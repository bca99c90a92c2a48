"""What was freed in small pieces is given back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from openhands_rl_plugin.core.machine import return_freed_memory

MEGABYTE = 1024 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and only glibc has the call")
def test_freed_pieces_are_returned() -> None:
    pieces = [bytearray(64 * 1024) for _ in range(1600)]
    kept = pieces[-1]  # at the top of the heap, so that nothing below it shrinks by itself
    before = resident_bytes()
    del pieces
    return_freed_memory()
    assert before - resident_bytes() > 50 * MEGABYTE
    assert len(kept) == 64 * 1024


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
