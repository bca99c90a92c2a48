"""How long to wait before the next try."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Pauses that double from ``first`` up to ``longest`` seconds.

    Each is varied at random by up to a quarter, so that clients which failed together do not come back together; the
    mean, and so the patience over several tries, is that of the plain sequence.
    """

    first: float
    longest: float

    def pause(self, failures: int) -> float:
        """Seconds to wait after failure number ``failures``, counted from 1."""
        # The exponent is bounded because a float is: 2**1024 overflows.
        plain = min(self.first * 2.0 ** min(failures - 1, 60), self.longest)
        return plain * random.uniform(0.75, 1.25)

    async def wait(self, failures: int, *, at_most: float = math.inf) -> None:
        """Sleep for ``pause(failures)``, but not longer than ``at_most`` seconds."""
        await asyncio.sleep(min(self.pause(failures), at_most))
