"""What keeps torch's threads quick: settings from before torch is imported."""

from __future__ import annotations

import os

SPIN_COUNT = "4000"
KERNELS_KEPT = "128"


def prepare_threads() -> None:
    """Make OpenMP's waiting threads spin only briefly before they sleep. No effect once torch is loaded.

    A decoding step is several hundred parallel regions. libgomp's default is to spin at the end of each for
    milliseconds; where another process uses one of the cores, every region then waits for a whole scheduling quantum
    (measured on 2 cores: 950 ms a step instead of 25). Not to spin at all costs a wake-up in every region (75 ms
    instead of 57). What the environment says already is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    # oneDNN compiles a kernel for every number of rows and keeps 1,024 (measured: 352 MB more after 500 sizes of one
    # layer, 213 MB with 16 kept), and torch as many of bfloat16 in a cache of its own (0.7 GB of a server after 160
    # requests). Packed batches seldom have a size twice, so few are worth keeping: where a few dozen come again and
    # again, it costs 2 ms of a decoding step.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, KERNELS_KEPT)
