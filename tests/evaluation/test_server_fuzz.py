"""The fuzzing of the servers, with few requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.performance.servers.fuzz import fuzz, servers


@pytest.mark.slow
def test_hostile_requests_stop_no_server(model: Path, tmp_path: Path) -> None:
    with servers(str(model), tmp_path) as found:
        tallies = fuzz(found, 600, seed=7)
    assert {name: (tally.bad, tally.lost) for name, tally in tallies.items()} == dict.fromkeys(tallies, ([], []))
    assert all(tally.honest > 10 and tally.sent >= 150 for tally in tallies.values())
