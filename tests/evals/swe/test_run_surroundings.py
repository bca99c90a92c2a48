"""The time limit of a run of tests leaves out what is compiled before them."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.environments.workspace.processes import Prelude, run


@pytest.mark.parametrize(
    ("script", "late"),
    [
        ("sleep 0.8; printf MA; printf 'RK\\n'; sleep 0.1", False),
        ("echo MARK; sleep 20", True),
        ("sleep 20; echo MARK", True),
    ],
)
async def test_a_limit_counts_from_the_end_of_the_prelude(script: str, late: bool) -> None:
    ended = await run(["sh", "-c", script], timeout=0.5, prelude=Prelude(b"MARK", 1.5))
    assert ended.timed_out is late and ended.seconds < 5
