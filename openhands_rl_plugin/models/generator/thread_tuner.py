"""How many threads a small step runs on: decided by measuring, because it depends on what else the machine does."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# A step of more tokens than this always gains from all threads.
SMALL_STEP_TOKENS = 64
# After so many steps, the other numbers of threads are tried again for a few, so that a change of the load is noticed.
TRY_EVERY = 64
TRY_STEPS = 3
_REMEMBERED = 5


class ThreadTuner:
    """Runs small steps on the number of threads that was fastest lately.

    On idle cores more threads are faster. When another process uses a core, each of a step's hundreds of parallel
    regions waits for the slower thread, and one thread alone is faster than two. Not thread-safe: one caller.
    """

    def __init__(self) -> None:
        most = torch.get_num_threads()
        counts = [2**i for i in range(most.bit_length()) if 2**i < most]
        # The number of threads belongs to the calling thread, so each number has a thread of its own.
        self._pools = {count: ThreadPoolExecutor(1, "pace", _set_threads, (count,)) for count in counts}
        for pool in self._pools.values():
            pool.submit(torch.get_num_threads).result()
        # Setting it there also set what threads to come will start with.
        torch.set_num_threads(most)
        self._most = most
        self._sizes: dict[int, _StepTimes] = {}

    def run[T](self, tokens: int, compute: Callable[[], T]) -> T:
        """The result of ``compute``, a step of ``tokens`` tokens."""
        if tokens > SMALL_STEP_TOKENS or not self._pools:
            return compute()
        size = self._sizes.setdefault(tokens.bit_length(), _StepTimes((*self._pools, self._most)))
        count = size.choose()
        pool = self._pools.get(count)
        started = time.perf_counter()
        result = compute() if pool is None else pool.submit(compute).result()
        size.record(count, time.perf_counter() - started)
        return result

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools.values():
            pool.shutdown()


class _StepTimes:
    """What is known of steps of about one size."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._seconds = {count: deque[float](maxlen=_REMEMBERED) for count in counts}
        self._trials: deque[int] = deque()
        self._until_trial = 0

    def choose(self) -> int:
        """The number of threads for the next step: the fastest, or one that is due to be tried."""
        if not self._trials:
            if self._until_trial:
                self._until_trial -= 1
                return min(self._seconds, key=lambda count: statistics.median(self._seconds[count]))
            self._until_trial = TRY_EVERY
            self._trials.extend(count for count in self._seconds for _ in range(TRY_STEPS))
        return self._trials.popleft()

    def record(self, count: int, seconds: float) -> None:
        """Remember how long a step took."""
        self._seconds[count].append(seconds)


def _set_threads(count: int) -> None:
    torch.get_num_threads()  # A thread's first use of torch resets its number; let that be over.
    torch.set_num_threads(count)
