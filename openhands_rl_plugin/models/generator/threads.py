"""Settings of torch's libraries that must be in the environment before torch is first imported."""

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
    # oneDNN compiles a kernel for every number of rows and keeps 1,024 (measured: 352 MB more after 500 sizes of
    # one layer, 213 MB with 16 kept). Packed batches seldom have a size twice, so few are worth keeping.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS_KEPT)
