"""Whether a server samples with a new version, judged by logprobs that both sides round: simulated updates."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.types import Probe
from openhands_rl_plugin.models.adapters.publisher import Older, check_served_logprobs

pytestmark = pytest.mark.contract

DRAWS = 300


def refused(served: Sequence[float], trained: Sequence[float], older: Older) -> bool:
    probe = Probe(token_ids=tuple(range(len(trained) + 1)), logprobs=tuple(trained), max_difference=10.0)
    try:
        check_served_logprobs("new", served, probe, older)
    except PublishError:
        return True
    return False


def share_refused(*, update: float, rounding: float, tokens: int, stale: bool) -> float:
    """Share of publications that are refused. ``update``, ``rounding``: standard deviations in nats."""
    draw = random.Random(f"{update} {rounding} {tokens}")

    def normal(width: float) -> list[float]:
        return [draw.gauss(0.0, width) for _ in range(tokens)]

    count = 0
    for _ in range(DRAWS):
        change, offset = normal(update), normal(0.03)
        before, after = normal(rounding), [a + b for a, b in zip(change, normal(rounding), strict=True)]
        old = [a + b for a, b in zip(offset, normal(rounding), strict=True)]
        new = old if stale else [a + b + c for a, b, c in zip(offset, change, normal(rounding), strict=True)]
        count += refused(new, after, ("old", before, old))
    return count / DRAWS


@pytest.mark.parametrize("tokens", [27, 100])
@pytest.mark.parametrize("update", [0.002, 0.02, 0.05, 0.15])
def test_an_update_in_service_is_accepted_however_small(update: float, tokens: int) -> None:
    assert share_refused(update=update, rounding=0.045, tokens=tokens, stale=False) <= 0.01


@pytest.mark.parametrize(("update", "rounding"), [(0.02, 0.045), (0.15, 0.03), (0.002, 0.0003)])
def test_a_server_that_ignored_the_update_is_refused(update: float, rounding: float) -> None:
    assert share_refused(update=update, rounding=rounding, tokens=27, stale=True) >= 0.99
