"""What the benchmark of sabotaged candidates counts as stopped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from evaluation.performance.watch.sabotage import HONEST, NOTHING, PASSED, UNDECIDED, table, verdict
from openhands_rl_plugin.contrib.watch.journal import Entry, WatchStep
from openhands_rl_plugin.core.types import JsonObject

BEGUN: tuple[tuple[WatchStep, JsonObject], ...] = (
    (WatchStep.JUDGED, {}),
    (WatchStep.GATHERED, {}),
    (WatchStep.TRAINED, {}),
)


@pytest.mark.parametrize(
    ("steps", "stopped"),
    [
        ([(WatchStep.HELD, {"gate": "canary"})], "canary"),
        ([*BEGUN, (WatchStep.MEASURED, {"mean": 0.5}), (WatchStep.HELD, {"gate": "safety"})], "safety"),
        ([*BEGUN, (WatchStep.ADMITTED, {}), (WatchStep.JUDGED, {})], PASSED),
        ([(WatchStep.JUDGED, {})], NOTHING),
        ([(WatchStep.JUDGED, {}), (WatchStep.COULD_NOT, {})], UNDECIDED),
        ([*BEGUN, (WatchStep.COULD_NOT, {})], UNDECIDED),
        ([*BEGUN, (WatchStep.SHARED, {})], UNDECIDED),
        ([], UNDECIDED),
    ],
)
def test_only_a_gate_or_the_lack_of_anything_to_train_on_stops(
    steps: Sequence[tuple[WatchStep, JsonObject]], stopped: str
) -> None:
    entries = [
        Entry(number=at, at=0.0, step=step, said=f"line {at}", figures=figures)
        for at, (step, figures) in enumerate(steps, 1)
    ]
    found = verdict(entries)
    assert found["stopped"] == stopped and (not entries or found["said"])
    counted = table({HONEST: {**found, "minutes": 0.1}, "a sabotage": {**found, "minutes": 0.1}})
    assert counted.endswith(f"{int(stopped not in (PASSED, UNDECIDED))} of 1 were stopped")
