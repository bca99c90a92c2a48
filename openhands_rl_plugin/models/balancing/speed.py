"""How long a server's calls take, measured from when they begin and end.

By Little's law a call takes ``area / answers`` seconds on average, where ``area`` is the integral of the open calls
over time. Calls that hang are in it before they end. With more or fewer open calls than there were, that is scaled.
"""

from __future__ import annotations

import math
from typing import NamedTuple

REMEMBERED = 32
"""So many answers ago a measurement has a weight of 1/e: speeds change with the lengths of prompts."""
_TOGETHER = 4
"""So many calls are taken to go as fast as one, because servers answer in batches. With 0, of two servers with places
left the one that has more calls would look faster by that alone, and get all of them."""

_FADES = 300.0
"""Seconds without a call in which a measurement gets a weight of 1/e: a server that was slow once, because it had just
started or its GPU was another's, is tried again."""


class Speed(NamedTuple):
    """``area``: call-seconds; ``busy``: seconds with any open call; ``answers``: how many came meanwhile."""

    area: float = 0.0
    busy: float = 0.0
    answers: float = 0.0

    def plus(self, other: Speed, times: float = 1.0) -> Speed:
        """With what was measured elsewhere."""
        return Speed(*(one + times * two for one, two in zip(self, other, strict=True)))

    def after(self, seconds: float, open_calls: int) -> Speed:
        """With that time."""
        if not open_calls:
            return UNKNOWN.plus(self, math.exp(-seconds / _FADES))
        return self.plus(Speed(seconds * open_calls, seconds))

    def answered(self) -> Speed:
        """With one more answer; what was before it counts a little less."""
        return Speed(answers=1.0).plus(self, 1 - 1 / REMEMBERED)

    def seconds(self, open_calls: int) -> float:
        """What a call takes where so many are open with it; 0 where nothing was measured."""
        if not self.answers or not self.busy:
            return 0.0
        usual = self.area / self.busy
        return self.area / self.answers * (open_calls + _TOGETHER) / (usual + _TOGETHER)


UNKNOWN = Speed()
"""Of a server that has answered nothing."""
