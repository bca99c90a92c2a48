"""What docs/openhands-v1.md tells to run and to write, as far as it can be run without containers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agent_server_process import NO_AGENTS_OF_OTHERS, takes_agents_of_others
from openhands.sdk import LLM, Tool
from openhands.sdk.llm import Message, TextContent
from scripted_model import ScriptedModel, says
from sdk_play import TERMINAL, finish, stored

from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.hosts.v1 import RLAgent

GUIDE = (Path(__file__).parents[3] / "docs/openhands-v1.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
URL = "http://127.0.0.1:8100/v1"


def block(language: str, word: str) -> str:
    (found,) = (text for text in re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.M | re.S) if word in text)
    return found


def command(word: str) -> list[str]:
    """The words of a command."""
    (line,) = (line for line in GUIDE.splitlines() if word in line and not line.startswith("|") and " --" in line)
    return shlex.split(line)


async def test_the_script_is_played_and_recorded(
    server: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script("model", [finish()])
    monkeypatch.chdir(tmp_path)
    script = block("python", "send_message").replace(URL, server.url)
    exec(compile(script, "openhands-v1.md", "exec"), {"__name__": "guide"})
    [episode] = await stored(tmp_path / "trajectories")
    assert episode.stop is StopReason.TERMINATED and episode.task.instruction == "Make the failing test pass"


def test_the_servers_body_is_one_that_it_takes() -> None:
    models = pytest.importorskip("openhands.agent_server.models")
    if not takes_agents_of_others():
        pytest.skip(NO_AGENTS_OF_OTHERS)
    body = json.loads(block("json", "initial_message"))
    request = models.StartConversationRequest.model_validate(body)
    assert isinstance(request.agent, RLAgent) and request.agent.rl["max_turns"] == 50
    assert request.initial_message is not None and request.initial_message.run


def test_the_benchmarks_model_file_is_recorded_by_the_gateway(
    server: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, program, *words = command("openhands-rl gateway")
    name, _, key = variable.partition("=")
    given = json.loads(block("json", '"usage_id": "agent"}\n').splitlines()[0])
    assert given["api_key"] == key and given["base_url"] == f"http://{words[words.index('--host') + 1]}:8200/v1"
    # The same command, at addresses of this machine.
    new = {"--upstream": server.url, "--host": "127.0.0.1", "--port": "0", "--store": str(tmp_path / "store")}
    words = [new.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    server.script("model", [says("Hello.")])
    environ = {**os.environ, name: key}
    with subprocess.Popen(
        [str(BIN / program), *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            urls = (url for line in process.stdout for url in re.findall(r"http://127.0.0.1:\d+", line))
            own = next(url for url in urls if not server.url.startswith(url))
            # As the benchmarks read the file.
            llm = LLM.model_validate_json(json.dumps({**given, "base_url": f"{own}/v1", "num_retries": 0}))
            llm.completion([Message(role="user", content=[TextContent(text="Hello?")])])
        finally:
            process.terminate()
            process.wait(30)
    [episode] = asyncio.run(stored(tmp_path / "store"))
    [sampled] = [node for node in episode.nodes if node.sampled]
    assert sampled.message.content == "Hello." and sampled.tokens is not None


def test_the_benchmarks_agent_is_replaced_by_rlagent(monkeypatch: pytest.MonkeyPatch) -> None:
    infer: Any = ModuleType("benchmarks.swebench.run_infer")
    made = []
    # What ``evaluate_instance`` of the benchmark gives its agent.
    infer.main = lambda: made.append(
        infer.Agent(
            llm=LLM(model="openai/model", api_key="key", usage_id="agent"),
            tools=[Tool(name=TERMINAL)],
            system_prompt_kwargs={"cli_mode": True},
            condenser=None,
            agent_context=None,
        )
    )
    for name in ("benchmarks", "benchmarks.swebench"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "benchmarks.swebench.run_infer", infer)
    monkeypatch.setattr(sys.modules["benchmarks.swebench"], "run_infer", infer, raising=False)
    exec(compile(block("python", "run_infer"), "openhands-v1.md", "exec"), {"__name__": "guide"})
    [agent] = made
    assert type(agent) is RLAgent and agent.rl["rollout_strategy"] == "BestOfN"
