"""The guard over the laptop suite: no task's own patch is flagged.

Environments come from the index once and are kept in ``OPENHANDS_RL_SWE_CACHE``, so the test runs where that is named.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from repository_samples import needs_sandbox

from openhands_rl_plugin.evals.runs.backends import make_backend
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.guard.patch import flags_of_patch
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.packages import suite_file

pytestmark = pytest.mark.contract

CACHE = os.environ.get("OPENHANDS_RL_SWE_CACHE", "")


def test_no_patch_of_the_suite_is_flagged_even_without_knowing_the_fix() -> None:
    rows = read_instances(suite_file("swe_local.jsonl"))
    assert len(rows) >= 60
    unknown = [(row.model_copy(update={"patch": ""}), row.patch) for row in rows]
    assert [flag for row, patch in unknown for flag in flags_of_patch(row, patch)] == []


@pytest.mark.slow
@needs_sandbox
@pytest.mark.skipif(not CACHE, reason="set OPENHANDS_RL_SWE_CACHE")
@pytest.mark.timeout(1800)
async def test_no_task_of_the_suite_is_flagged(tmp_path: Path) -> None:
    backend, turns = make_backend("local", cache=Path(CACHE)), asyncio.Semaphore(2)

    async def said(row: Instance) -> tuple[str, bool, str, tuple[object, ...]]:
        async with turns:
            verdict = await backend.grade(row, row.patch, logs=tmp_path / row.instance_id, timeout=600.0)
        return row.instance_id, verdict.resolved, verdict.reason, verdict.flags

    found = await asyncio.gather(*map(said, read_instances(suite_file("swe_local.jsonl"))))
    assert [each for each in found if each[1:] != (True, "", ())] == []
