"""What keeps torch's threads quick: settings from before torch is imported, and work in threads that end with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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


def in_passing_thread[T](work: Callable[[], T]) -> T:
    """The result of ``work``, which uses torch, in a thread that ends with it.

    Each thread that has computed in parallel keeps a team of OpenMP threads as long as it lives. Where all teams
    together have more threads than there are processors, libgomp hardly spins any more, and every parallel region costs
    a wake-up: a model that was loaded by a thread which lives on takes 1.4 times as long for a step in another thread
    (2 cores, SmolLM2-135M, 20 sequences: 170 to 210 ms instead of 110 to 140).
    """
    with ThreadPoolExecutor(1, "passing") as thread:
        return thread.submit(work).result()
