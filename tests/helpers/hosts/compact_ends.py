"""What starts an agent, as processes: each with ``[rl.workspace] prompt = "compact"`` in the file that a user has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compact_play import MOST_TOKENS, before_the_task, count_tokens
from needs import needs_bubblewrap
from scripted_model import ScriptedModel, call, says
from tiny_model import write_model

TASK = "Make the test pass."
PATIENCE = 500.0
MARKS = (
    needs_bubblewrap,
    pytest.mark.slow,
    pytest.mark.timeout(PATIENCE + 60),
    pytest.mark.shows("compact prompt, from every end"),
)
BIN = Path(sys.executable).parent
CONFIG = """
[core]
default_agent = "RLAgent"
runtime = "openhands_rl_plugin.hosts.v0.runtime.WorkspaceRuntime"
workspace_base = "./project"
file_store = "memory"
cache_dir = "./cache"

[llm]
model = "openai/{model}"
base_url = "{url}"
api_key = "none"
native_tool_calling = true

[agent]
enable_mcp = false

[agent.RLAgent]
classpath = "openhands_rl_plugin.hosts.v0.agent.RLAgent"

[rl]
max_turns = 4
storage = {{ path = "./store", durable = false }}
[rl.workspace]
prompt = "compact"
[rl.serving]
base_url = "{url}"
model = "{model}"
server = "vllm"
adapters_path = "./adapters"
[rl.loop]
iterations = 0
held_out = 1
"""
REPAIR = ["repair-1", "--config", "config.toml", "--timeout", "100"]
COMMANDS = {
    "run": ["openhands-rl", "run", "-t", TASK, "--workspace", "project", "--config", "config.toml"],
    "rollout": ["openhands-rl", "rollout", "--task", "inflection-camelize-constant-1", "--config", "config.toml"],
    "evaluate": [
        *("openhands-rl", "evaluate", *REPAIR, "--agent", "RLAgent", "--limit", "1", "--out", "out"),
        *("--model", "openai/{model}", "--base-url", "{url}", "--native-tool-calling", "--max-iterations", "4"),
    ],
    "loop": ["openhands-rl", "loop", *REPAIR, "--model", "{weights}", "--run-dir", "run"],
}
MAIN = [sys.executable, "-m", "openhands.core.main", "-t", TASK]


def at_an_end[Test](test: Test) -> Test:
    """The marks of a test that starts a process."""
    for mark in MARKS:
        test = mark(test)
    return test


def write_config(server: ScriptedModel, folder: Path, model: str) -> None:
    """The user's file and project; the model finishes at once."""
    server.context = 100_000
    server.script(model, [])
    server.policies[model] = lambda _: says("So.", call("finish", {"message": "Done."}))
    (folder / "project").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(model=model, url=server.url))


def start(server: ScriptedModel, folder: Path, words: list[str], **values: object) -> str:
    """Run the command to its end, in a home of its own; what it said. Fails where its exit code does."""
    environ = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
    }
    command = [word.format(model=folder.name, url=server.url, **values) for word in words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def check_first_request(requests: list[dict[str, Any]], task: str = TASK, project: str = "/workspace") -> None:
    """Instructions and tools are the short ones. ``project``: its folder as the agent sees it."""
    first = requests[0]
    assert len(first["tools"]) == 3, [tool["function"]["name"] for tool in first["tools"]]
    count = count_tokens(said := before_the_task(first, task).replace(project, "/workspace"))
    assert count <= MOST_TOKENS, f"{count} tokens: {said}"


def check_command(server: ScriptedModel, folder: Path, name: str) -> None:
    """One of ``COMMANDS``, with a repair task where it takes a suite."""
    write_config(server, folder, folder.name)
    weights = write_model(folder / "weights") if name == "loop" else ""
    start(server, folder, COMMANDS[name], weights=weights)
    check_first_request(server.requests[folder.name], TASK if name == "run" else "test_")
