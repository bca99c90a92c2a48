"""Check by its logprobs that a server samples with a new version of an adapter, and not still with the previous one.

Successive versions differ by less than two correct implementations of one model may: in runs of the demo by 0.06 to
0.13 nats on average, where bfloat16 alone is allowed 0.15. So logprobs near the trainer's prove the base model and the
kind of weights, but not the version. The version is proven by the direction in which the logprobs have moved since the
previous version: over a hundred tokens, noise has no direction. A small update may move the trainer's logprobs by no
more than bfloat16 rounds them; such a move proves nothing, unless the server's logprobs did not move at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.types import Probe

_STANDARD_ERRORS = {False: 3.0, True: 5.0}
"""How many standard errors nearer to the previous version a server must be to be refused, by whether its logprobs of
the previous version are known. If they are, a server that ignored the update repeats them, which any bound detects:
then the bound can exclude false alarms (0 to 3 in 3,000 simulated updates of 0 to 0.15 nats with 0.045 of rounding)."""

_SAME_VERSION = 1e-3
"""Mean nats: versions that are nearer than this by the trainer's own logprobs cannot be distinguished."""


class PreviousVersion(NamedTuple):
    """The version in use before: its name, and the trainer's and this server's logprobs of the same probe.

    The latter are ``None`` when unknown. Compared with them, the constant difference of the two implementations cancels
    out.
    """

    name: str
    trained: Sequence[float]
    served: Sequence[float] | None = None


def check_served_logprobs(name: str, served: Sequence[float], probe: Probe, previous: PreviousVersion | None) -> float:
    """The mean absolute difference from the trainer's logprobs, in nats.

    Raises ``PublishError`` when it is above the probe's bound, or when the server still serves ``previous``.
    """
    difference = _mean_distance(served, probe.logprobs)
    if not difference <= probe.max_difference:
        raise PublishError(
            f"{name} was refused: the server's logprobs differ from the trainer's by {difference:.4f} nats on average, "
            f"the bound is {probe.max_difference:.4f}; the version in use stays. Does the server serve the base model "
            "that was trained?"
        )
    if previous is not None and _unchanged(served, probe.logprobs, previous):
        raise PublishError(
            f"{name} was refused: the server took it, but still answers as {previous.name} did; the version in use "
            "stays. Does it cache responses by model name, or fall back to another adapter? If nothing else helps, "
            "restart it"
        )
    return difference


def _unchanged(served: Sequence[float], trained: Sequence[float], previous: PreviousVersion) -> bool:
    """Whether the server moved less than half of the way that the update explains, by more than chance explains."""
    moved = [new - old for new, old in zip(trained, previous.trained, strict=True)]
    if _mean_distance(trained, previous.trained) < _SAME_VERSION:
        return False
    start = previous.trained if previous.served is None else previous.served
    seen = [new - old for new, old in zip(served, start, strict=True)]
    length = math.sqrt(sum(each * each for each in moved))
    along = sum(a * b for a, b in zip(seen, moved, strict=True)) / length
    still, apart = sum(each * each for each in seen), sum((a - b) ** 2 for a, b in zip(seen, moved, strict=True))
    known = previous.served is not None
    # Trainer and server round independently, so half of the squared difference of their moves is the trainer's.
    rounding = min(still, apart / 2) if known else 0.0
    expected = max(0.0, length - rounding / length)
    return 0.5 * expected - along > _STANDARD_ERRORS[known] * math.sqrt(min(still, apart) / len(seen))


def _mean_distance(some: Sequence[float], others: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(some, others, strict=True)) / len(some)
