"""Published rows by the local back end: gold patches are resolved and not flagged, an empty change is not resolved.

Needs rows, git mirrors and the network, which no test may fetch by itself: name them by ``OPENHANDS_RL_SWE_ROWS`` (a
file) and ``OPENHANDS_RL_SWE_MIRRORS`` (a folder). The environments are kept in ``OPENHANDS_RL_SWE_CACHE``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from repository_samples import NOTHING, needs_sandbox

from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.types import Instance, VerdictKind

ROWS, MIRRORS = (os.environ.get(f"OPENHANDS_RL_SWE_{name}", "") for name in ("ROWS", "MIRRORS"))

pytestmark = [
    pytest.mark.contract,
    pytest.mark.slow,
    needs_sandbox,
    pytest.mark.skipif(not (ROWS and MIRRORS), reason="set OPENHANDS_RL_SWE_ROWS and OPENHANDS_RL_SWE_MIRRORS"),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("row", read_instances(Path(ROWS)) if ROWS else [], ids=lambda row: row.instance_id)
async def test_gold_is_resolved_and_nothing_is_not(row: Instance, tmp_path: Path) -> None:
    cache = Path(os.environ.get("OPENHANDS_RL_SWE_CACHE") or tmp_path / "cache")
    backend = LocalBackend(cache=cache, sources=[MirrorSource(Path(MIRRORS))], guard=RewardHackGuard())
    gold = await backend.grade(row, row.patch, logs=tmp_path / "gold", timeout=1800.0)
    nothing = await backend.grade(row, NOTHING, logs=tmp_path / "nothing", timeout=1800.0)
    assert (gold.kind, gold.reason, gold.flagged) == (VerdictKind.RESOLVED, "", ())
    assert nothing.kind is VerdictKind.UNRESOLVED
    assert nothing.seconds - nothing.test_seconds < 2.0
