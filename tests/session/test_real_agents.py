"""Published agents, unchanged, under ``openhands-rl run -- COMMAND``: what they ask is recorded as one episode.

``.ci/peers agents`` makes the folder that OPENHANDS_RL_AGENTS names: mini-swe-agent and OpenHands' own command line in
environments of their own, Claude Code and Codex of npm.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from gateway_world import Body, Model, serving, streamed
from protocol_wire import call_item, message, message_events, response, response_events, text_item
from scripted_model import call, reply, serve

from openhands_rl_plugin import FileTrajectoryStorage, Trajectory
from openhands_rl_plugin.core.types import StopReason

ROOT = Path(__file__).parents[2]
AGENTS = Path(os.environ.get("OPENHANDS_RL_AGENTS", ""))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("OPENHANDS_RL_AGENTS"), reason="needs OPENHANDS_RL_AGENTS: .ci/peers agents"),
]
TASK, SHELL = "Write hello into greeting.txt", "echo hello > greeting.txt; cat greeting.txt"
CODEX = (
    "exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy -c model_provider=rl "
    '-c "model_providers.rl={name=\\"rl\\", base_url=\\"$OPENAI_BASE_URL\\", env_key=\\"OPENAI_API_KEY\\"}" "$0"'
)
CHAT = {
    "mini-swe-agent": (["mini", "-m", "openai/policy", "-y", "--exit-immediately", "-l", "0", "-t"], "bash"),
    "OpenHands": (["openhands", "--headless", "--override-with-envs", "-t"], "terminal"),
}
OTHERS = {
    "Claude Code": ["claude", "--model", "policy", "--dangerously-skip-permissions", "-p"],
    "Codex": ["sh", "-c", CODEX],
}


async def imitated(request: web.Request, body: Body) -> web.StreamResponse:
    """A model server of the Messages and the Responses API: one command of the shell, then an end."""
    done = SHELL in json.dumps(body.get("messages") or body.get("input"))
    if request.path.endswith("/messages"):
        run = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": SHELL, "description": "w"}}
        last = message({"type": "text", "text": "Done."}, number=2)
        return await streamed(request, [*message_events(last if done else message(run, stop="tool_use"))])
    item = text_item("Done.") if done else call_item("exec_command", {"cmd": SHELL}, "call_1")
    return await streamed(request, [*response_events(response(item, number=2 if done else 1))])


def policy(body: dict[str, Any], shell: str) -> dict[str, Any]:
    names = [tool["function"]["name"] for tool in body["tools"]]
    if not any(each["role"] == "assistant" for each in body["messages"]):
        return reply("I write.", call(shell, {"command": SHELL, "security_risk": "LOW"}))
    if "finish" in names:
        return reply(None, call("finish", {"message": "Done."}, "f"))
    return reply(None, call(shell, {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}, "f"))


async def recorded(words: list[str], url: str, folder: Path) -> Trajectory:
    programs = [AGENTS / "mini/bin", AGENTS / "openhands/bin", AGENTS / "node_modules/.bin"]
    environ = os.environ | {"PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]), "HOME": str(folder)}
    environ |= {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LLM_MODEL": "openai/policy"}
    environ |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1", "CODEX_HOME": str(folder)}
    (folder / "work").mkdir()
    command = [sys.executable, "-m", "openhands_rl_plugin", "run", "--base-url", url, "--store", "store"]
    command += ["--workspace", "work", "--", *words, TASK]
    options = {"cwd": folder, "env": environ, "capture_output": True, "text": True, "timeout": 280}
    done = await asyncio.to_thread(subprocess.run, command, stdin=subprocess.DEVNULL, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (folder / "work/greeting.txt").read_text() == "hello\n"
    async with FileTrajectoryStorage(folder / "store") as storage:
        [(trajectory, _)] = [found async for found in storage.find()]
    assert trajectory.stop is StopReason.TERMINATED and (trajectory.evidence or {})["exit_code"] == 0
    return trajectory


@pytest.mark.parametrize("name", CHAT)
async def test_chat_completions_are_recorded_with_token_ids(name: str, tmp_path: Path) -> None:
    words, shell = CHAT[name]
    with serve() as server:
        server.policies["policy"] = lambda body: policy(body, shell)
        found = await recorded(words, server.url, tmp_path)
    first, last = (found.nodes[at] for at in found.acted())
    assert first.tokens is not None and last.tokens is not None and last.tokens.extends
    assert first.message.tool_calls[0].name == shell


def choosing(body: dict[str, Any]) -> dict[str, Any]:
    """One seed of two writes what is asked for; a judge says so."""
    last = json.dumps(body["messages"][-2:])
    if "Yes or No" in last:
        return reply("Yes" if "echo hello" in last else "No")
    if body["messages"][-1]["role"] == "user":
        return reply("I write.", call("bash", {"command": SHELL if body["seed"] % 2 else "echo no > greeting.txt"}))
    return policy(body, "bash")


def test_mini_swe_agent_is_searched_in_forks(tmp_path: Path) -> None:
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(AGENTS / "mini-beside"), *sys.path]),
        "HOME": str(tmp_path),
    }
    (tmp_path / "work").mkdir()
    with serve() as server:
        server.policies["policy"] = choosing
        words = [server.url, "policy", "work", TASK, "grep -q hello greeting.txt"]
        command = [sys.executable, ROOT / "docs/examples/search_another_agent.py", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280)
    assert done.stdout.splitlines()[-1].endswith("exit code 0"), done.stdout + done.stderr
    assert " 0 simulated" not in done.stdout and (tmp_path / "work/greeting.txt").read_text() == "hello\n"


@pytest.mark.parametrize("name", OTHERS)
async def test_other_protocols_are_recorded_for_imitation(name: str, tmp_path: Path) -> None:
    if not (AGENTS / "node_modules").exists():
        pytest.skip("needs npm: .ci/peers agents")
    async with serving(Model(behave=imitated)) as url:
        found = await recorded(OTHERS[name], url, tmp_path)
    first, last = (found.nodes[at] for at in found.acted())
    assert SHELL in first.message.tool_calls[0].arguments and last.message.content == "Done."
    assert first.tokens is None and "reports none" in str(first.metadata["missing"])
    assert "hello" in str(found.nodes[last.parent or 0].message.content) and found.tools
