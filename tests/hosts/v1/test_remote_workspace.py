"""A conversation whose client is another process: RLAgent plays, forks and records in the agent server, and says so."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_server_process import NO_AGENTS_OF_OTHERS, running_agent_server, takes_agents_of_others
from needs import needs_bubblewrap
from openhands.sdk import Agent, Conversation, Workspace
from scripted_model import ScriptedModel, call, says
from sdk_play import EDITOR, TERMINAL, finish, make_agent, make_llm, stored

from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.hosts.v1.agent import KEY

pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(not takes_agents_of_others(), reason=NO_AGENTS_OF_OTHERS)]


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_agent_server(tmp_path_factory.mktemp("agent-server")) as url:
        yield url


def play(url: str, agent: Agent, workspace: Path) -> str | None:
    """One task, from a client; what the conversation then says of its recording."""
    remote = Workspace(host=url, working_dir=str(workspace))
    conversation = Conversation(agent=agent, workspace=remote, visualizer=None)
    conversation.send_message("Correct calc.py.")
    conversation.run()
    info: dict[str, Any] = httpx.get(f"{url}/api/conversations/{conversation.id}", timeout=30).json()
    assert info["execution_status"] == "finished"
    conversation.close()
    return info["agent_state"].get(KEY)


def finishes(body: dict[str, Any]) -> dict[str, Any]:
    """At once; the server asks for a title, too."""
    return finish() if body.get("tools") else says("A title")


def corrects(body: dict[str, Any]) -> dict[str, Any]:
    """Looks, then writes what is right or what is not, as the seed says."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    if not body.get("tools"):
        return says("Yes" if "a + b" in json.dumps(body["messages"]) else "No")
    if turn == 0:
        return says("I look.", call(TERMINAL, {"command": "pwd; ls /workspace"}, "call-1"))
    if turn == 1:
        new = "a + b" if body["seed"] % 2 else "a * b"
        edit = {"command": "str_replace", "path": "/workspace/calc.py", "old_str": "a - b", "new_str": new}
        return says(None, call(EDITOR, edit, f"call-{new}"))
    return finish()


@needs_bubblewrap
async def test_a_search_in_the_servers_own_sandbox(
    agent_server: str, server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.policies["remote"] = corrects
    rl = {
        "workspace": {"isolation": "bubblewrap"},
        "rollout_strategy": "BestOfN",
        "strategy": {"n": 4, "value": "model"},
        "sampling": {"seed": 3},
    }
    said = play(agent_server, make_agent(make_llm(server, "remote"), tmp_path / "store", rl=rl), workspace)
    [episode] = await stored(tmp_path / "store")
    assert (episode.stop, episode.failure) == (StopReason.TERMINATED, None)
    told = [message.content or "" for message in episode.messages() if message.role == "tool"]
    assert told[0].startswith("/workspace\ncalc.py")
    assert "a + b" in (workspace / "calc.py").read_text() and "+    return a + b" in str(episode.evidence["git_patch"])
    simulated = [node for node in episode.nodes if node.simulated and "a * b" in str(node.message.tool_calls)]
    assert simulated, "what was not chosen was executed in a fork only"
    assert all(node.tokens is not None for node in episode.sampled())
    assert said == f"recorded in {tmp_path / 'store'} on {socket.gethostname()} as {episode.id[:8]}"


async def test_a_server_that_cannot_record_says_so_in_the_conversations_state(
    agent_server: str, server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.policies["unrecorded"] = finishes
    (tmp_path / "store").write_text("a file")
    said = play(agent_server, make_agent(make_llm(server, "unrecorded"), tmp_path / "store"), workspace)
    assert said is not None and said.startswith("not recorded: ")
    assert str(tmp_path / "store") in said and "\n" not in said


async def test_a_search_that_forks_nothing_says_so_in_the_conversations_state(
    agent_server: str, server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.policies["flat"] = finishes
    rl = {"workspace": {"isolation": "none"}, "rollout_strategy": "BestOfN", "strategy": {"n": 1}}
    said = play(agent_server, make_agent(make_llm(server, "flat"), tmp_path / "store", rl=rl), workspace)
    assert said is not None and said.endswith('; BestOfN forks nothing: isolation = "none"')
