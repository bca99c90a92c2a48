"""The programs of ``docs/examples``: short, and each runs."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_session import DOCS

from openhands_rl_plugin import FileTrajectoryStorage
from openhands_rl_plugin.apps.demo_model import ensure_model
from openhands_rl_plugin.testing import example_trajectory

EXAMPLES = DOCS / "examples"


def run(name: str, folder: Path, *words: str) -> str:
    """What a program prints, in a home of its own."""
    environ = {
        **os.environ,
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_reward_of_your_own_scores_a_store(tmp_path: Path) -> None:
    async def seed() -> None:
        async with FileTrajectoryStorage(tmp_path / "store") as storage:
            tested = example_trajectory(0).model_copy(update={"evidence": {"output": "3 passed, 1 failed in 0.2s"}})
            await storage.add(tested)
            await storage.add(example_trajectory(1))

    asyncio.run(seed())
    printed = run("own_reward.py", tmp_path, "store")
    assert re.search(r"^\w{8}: 0\.\d+$", printed, re.M) and "has no output of pytest" in printed


@pytest.mark.slow
def test_a_search_in_your_own_environment_beats_acting(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    react, mcts = map(float, re.findall(r": +([\d.]+)", run("own_environment.py", tmp_path)))
    assert mcts > react


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_agent_is_recorded_and_trained_on_and_two_versions_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = str(ensure_model())
    printed = run("record_another_agent.py", tmp_path, model)
    assert "Peru:" in printed and "12 " in printed and "policy-v000001: steps" in printed
    compared = run("evaluate_two_adapters.py", tmp_path, model, "adapters", "base", "1")
    assert re.search(r"tasks of both +6 .*difference .*p-value", compared, re.DOTALL), compared
    assert (tmp_path / "comparison/report.html").exists()
