"""``openhands-rl cli`` with the real OpenHands CLI 1.16, which pins an SDK of its own and so has its own environment.

``.ci/peers openhands-cli`` makes it; ``OPENHANDS_RL_CLI_PYTHON`` names its interpreter.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest
from scripted_model import ScriptedModel, call, says, serve

from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import StopReason, Trajectory
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

PYTHON = os.environ.get("OPENHANDS_RL_CLI_PYTHON", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON, reason="OPENHANDS_RL_CLI_PYTHON: no environment with OpenHands' CLI (.ci/peers)"),
]


def run(server: ScriptedModel, model: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in ``folder``, which is its home, too; the model is given as the CLI's users give it."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environ = {
        "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "TMPDIR": str(folder),
        "OPENHANDS_PERSISTENCE_DIR": str(home / ".openhands"),
        "LLM_MODEL": f"openai/{model}",
        "LLM_BASE_URL": server.url,
        "LLM_API_KEY": "key",
        "TERM": "xterm",
    }
    command = [str(Path(PYTHON).parent / "openhands-rl"), "cli", *words]
    return subprocess.run(
        command,
        cwd=folder / "project",
        env=environ,
        capture_output=True,
        text=True,
        timeout=350,
        stdin=subprocess.DEVNULL,
    )


def episodes(store: Path) -> list[Trajectory]:
    async def read() -> list[Trajectory]:
        async with FileTrajectoryStorage(store) as storage:
            return [trajectory async for trajectory, _ in storage.find(TrajectoryFilter(finished=None))]

    return asyncio.run(read())


def test_a_task_in_the_cli_is_played_by_rlagent_and_recorded(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    answers = [
        says("I write.", call("terminal", {"command": "echo hello > greeting.txt", "security_risk": "LOW"}, "c1")),
        says(None, call("finish", {"message": "It is written."}, "c2")),
    ]
    options = ["--store", str(tmp_path / "store"), "--", "--headless", "--json", "--override-with-envs"]
    with serve() as server:
        server.script("cli", answers)
        done = run(server, "cli", tmp_path, *options, "-t", "Write hello into greeting.txt")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert (tmp_path / "project/greeting.txt").read_text() == "hello\n", output
    [episode] = episodes(tmp_path / "store")
    sampled = [node for node in episode.nodes if node.sampled]
    assert episode.stop is StopReason.TERMINATED and len(sampled) == 2
    assert [node.tokens.extends for node in sampled if node.tokens] == [False, True]
    # Another run goes on with the conversation.
    [kept] = (tmp_path / "home/.openhands/conversations").iterdir()
    with serve() as server:
        server.script("cli", [says(None, call("finish", {"message": "Still there."}, "c3"))])
        done = run(server, "cli", tmp_path, *options, "--resume", kept.name, "-t", "Is it there?")
        heard = str(server.requests["cli"][0]["messages"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Write hello into greeting.txt" in heard and "Is it there?" in heard
    assert [each.stop for each in episodes(tmp_path / "store")] == [StopReason.TERMINATED] * 2
    [state] = (tmp_path / "home/.openhands").rglob("base_state.json")
    assert json.loads(state.read_text())["agent"]["kind"] == "RLAgent"
