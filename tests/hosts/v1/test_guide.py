"""An environment with OpenHands V1, and what docs/openhands-v1.md shows to run and to write."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agent_server_process import NO_AGENTS_OF_OTHERS, takes_agents_of_others
from openhands.sdk import LLM, Tool
from scripted_model import ScriptedModel
from sdk_play import TERMINAL, finish, stored

from openhands_rl_plugin.cli.doctor import check_all
from openhands_rl_plugin.config.host import installed_hosts
from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.hosts.v1 import RLAgent

GUIDE = (Path(__file__).parents[3] / "docs/openhands-v1.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8100/v1"


def block(language: str, word: str) -> str:
    (found,) = (text for text in re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.M | re.S) if word in text)
    return found


async def test_the_script_is_executed_and_recorded(
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


async def test_doctor_names_the_host() -> None:
    assert installed_hosts() == ("v1",)
    [(level, found)] = [(level, found) async for level, what, found in check_all(None) if what == "host"]
    assert level == "ok" and "OpenHands V1: openhands-sdk" in found
