"""Chooses the number of threads for small steps by measuring, because it depends on the load of the machine."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# A step with more tokens, such as a chunk of a prompt, is fastest on all threads. With guesses twenty answers are a
# step of 100 to 180 tokens: one of 100 of SmolLM2's took 400 ms on one thread beside two loops of short processes on
# two cores, and 530 on two.
SMALL_STEP_TOKENS = 192
# After ``TRY_EVERY`` steps, each number of threads is measured for ``TRY_STEPS`` steps, to detect changes of load.
TRY_EVERY = 64
TRY_STEPS = 3
_REMEMBERED = 5


class ThreadTuner:
    """Runs small steps on the number of threads that was fastest recently.

    On idle cores more threads are faster. When another process uses a core, each of the hundreds of parallel regions
    of a step waits for the slower thread, and one thread is faster than two. Not thread-safe.
    """

    def __init__(self) -> None:
        most = torch.get_num_threads()
        counts = [2**i for i in range(most.bit_length()) if 2**i < most]
        # The number of threads is a setting of the calling thread, so each number has its own thread.
        self._pools = {count: ThreadPoolExecutor(1, "thread-tuner", _set_threads, (count,)) for count in counts}
        for pool in self._pools.values():
            pool.submit(torch.get_num_threads).result()
        # That also changed the default of new threads.
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
        """Stop the threads."""
        for pool in self._pools.values():
            pool.shutdown()


class _StepTimes:
    """Recent durations of steps of about one size."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._seconds = {count: deque[float](maxlen=_REMEMBERED) for count in counts}
        self._trials: deque[int] = deque()
        self._until_trial = 0

    def choose(self) -> int:
        """The number of threads for the next step: the fastest, or the next trial."""
        if not self._trials:
            if self._until_trial:
                self._until_trial -= 1
                return min(self._seconds, key=lambda count: statistics.median(self._seconds[count]))
            self._until_trial = TRY_EVERY
            self._trials.extend(count for count in self._seconds for _ in range(TRY_STEPS))
        return self._trials.popleft()

    def record(self, count: int, seconds: float) -> None:
        """Record the duration of a step."""
        self._seconds[count].append(seconds)


def _set_threads(count: int) -> None:
    torch.get_num_threads()  # The first use of torch in a thread resets its setting, so use it once before.
    torch.set_num_threads(count)
