from __future__ import annotations

from openhands_rl_plugin.core.concurrency import Backoff


def test_pauses_double_up_to_the_longest_and_vary_by_a_quarter() -> None:
    backoff = Backoff(first=0.5, longest=10.0)
    for failures, plain in ((1, 0.5), (2, 1.0), (5, 8.0), (6, 10.0), (10_000, 10.0)):
        pauses = [backoff.pause(failures) for _ in range(200)]
        assert 0.75 * plain <= min(pauses) < plain < max(pauses) <= 1.25 * plain
