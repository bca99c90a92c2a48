"""RLAgent in the real agent server, chosen over REST, watched over WebSocket: complete and ended while it runs."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_server_process import NO_AGENTS_OF_OTHERS, running_agent_server, takes_agents_of_others
from needs import needs_bubblewrap
from openhands.sdk import Agent, Conversation, Workspace
from scripted_model import ScriptedModel, call, reply
from sdk_play import EDITOR, TERMINAL, finish, make_agent, make_llm, repair, stored, think
from websockets.asyncio.client import connect

from openhands_rl_plugin.core.types import StopReason, Trajectory
from openhands_rl_plugin.hosts.v1.agent import KEY

pytestmark = [
    pytest.mark.contract,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not takes_agents_of_others(), reason=NO_AGENTS_OF_OTHERS),
]


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_agent_server(tmp_path_factory.mktemp("agent-server")) as url:
        yield url


def conversation(server: ScriptedModel, model: str, workspace: Path, **changes: object) -> dict[str, object]:
    """The body of ``POST /api/conversations``."""
    llm = {"model": f"openai/{model}", "base_url": server.url, "api_key": "key", "usage_id": "agent", "num_retries": 0}
    storage = {"path": str(workspace.parent / "store"), "durable": False}
    return {
        "agent": {
            "kind": "RLAgent",
            "llm": llm,
            "tools": [{"name": "terminal"}, {"name": "file_editor"}],
            "rl": {"max_turns": 20, "storage": storage, "workspace": {"isolation": "none"}},
        },
        # A title would be asked of the same model.
        "autotitle": False,
        "workspace": {"kind": "LocalWorkspace", "working_dir": str(workspace)},
        "initial_message": {"role": "user", "content": [{"type": "text", "text": "Correct calc.py."}], "run": True},
        **changes,
    }


async def ended_episode(workspace: Path) -> Trajectory:
    """The one episode of the store, once it has ended."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if (found := await stored(workspace.parent / "store")) and found[0].stop is not StopReason.UNFINISHED:
            assert len(found) == 1
            return found[0]
        await asyncio.sleep(0.2)
    raise AssertionError("no episode ended although the conversation did")


async def events_until_ended(url: str, id: str) -> list[dict[str, object]]:
    """What the WebSocket sends, from the first event until the conversation has ended."""
    seen = []
    async with connect(f"{url.replace('http', 'ws', 1)}/sockets/events/{id}?resend_mode=all") as socket:
        async with asyncio.timeout(100):
            async for text in socket:
                seen.append(event := json.loads(text))
                if event.get("key") == "execution_status" and event["value"] in {"finished", "error", "stuck"}:
                    return seen
                # Subscribers get the whole state first, which may be the last.
                if event.get("key") == "full_state" and event["value"]["execution_status"] in {"finished", "error"}:
                    return seen
    raise AssertionError("the socket was closed before the conversation ended")


@pytest.mark.shows("agent server")
async def test_a_conversation_over_rest_is_watched_over_a_socket_and_its_episode_is_complete(
    agent_server: str, server: ScriptedModel, workspace: Path
) -> None:
    server.script("served-repair", repair(workspace))
    server.delay = 0.2
    made = httpx.post(
        f"{agent_server}/api/conversations", json=conversation(server, "served-repair", workspace), timeout=60
    )
    server.delay, id = 0.0, made.json()["id"]
    assert made.status_code == 201 and made.json()["agent"]["kind"] == "RLAgent"
    events = await events_until_ended(agent_server, id)
    # History and live events overlap.
    kinds = list({str(event["id"]): event["kind"] for event in events}.values())
    episode = await ended_episode(workspace)
    listed = httpx.get(f"{agent_server}/api/conversations/{id}/events/search?limit=100", timeout=30).json()["items"]
    assert [event["kind"] for event in listed].count("ActionEvent") == 4
    assert kinds.count("ActionEvent") == 4 and kinds.count("ObservationEvent") == 4
    assert episode.stop is StopReason.TERMINATED and episode.failure is None
    sampled = [node for node in episode.nodes if node.sampled]
    assert [node.tokens.extends for node in sampled if node.tokens] == [False, True, True, True]
    assert "+    return a + b" in str(episode.evidence["git_patch"])
    assert [event["llm_response_id"] for event in listed if event["kind"] == "ActionEvent"] == [
        node.metadata["response"]["id"] for node in sampled
    ]


async def test_a_limit_of_the_server_ends_the_episode_although_nobody_closes_the_conversation(
    agent_server: str, server: ScriptedModel, workspace: Path
) -> None:
    server.script("served-limit", [think(str(turn), f"call-{turn}") for turn in range(9)])
    body = conversation(server, "served-limit", workspace, max_iterations=2)
    made = httpx.post(f"{agent_server}/api/conversations", json=body, timeout=60)
    assert made.status_code == 201
    episode = await ended_episode(workspace)
    assert episode.stop is StopReason.MAX_TURNS and episode.failure is None
    assert len([node for node in episode.nodes if node.sampled]) == 2


@pytest.mark.parametrize("stop", [StopReason.TERMINATED, StopReason.NO_ACTION])
async def test_a_second_message_is_a_second_episode_of_the_same_conversation(
    agent_server: str, server: ScriptedModel, workspace: Path, stop: StopReason
) -> None:
    first_answer = finish("one", "call-1") if stop is StopReason.TERMINATED else reply("Which file?")
    server.script(f"served-{stop}", [first_answer, finish("two", "call-2")])
    body = conversation(server, f"served-{stop}", workspace)
    id = httpx.post(f"{agent_server}/api/conversations", json=body, timeout=60).json()["id"]
    first = await ended_episode(workspace)
    message = {"role": "user", "content": [{"type": "text", "text": "And again."}], "run": True}
    httpx.post(f"{agent_server}/api/conversations/{id}/events", json=message, timeout=60).raise_for_status()
    until = time.monotonic() + 60
    while len(found := await stored(workspace.parent / "store")) < 2 or found[1].stop is StopReason.UNFINISHED:
        assert time.monotonic() < until
        await asyncio.sleep(0.2)
    assert [each.task.instruction for each in found] == ["Correct calc.py.", "And again."]
    assert found[0].id == first.id
    assert [(each.stop, each.failure) for each in found] == [(stop, None), (StopReason.TERMINATED, None)]
    assert {each.group_id for each in found} == {id}


def test_settings_that_are_wrong_are_refused_with_their_name(
    agent_server: str, server: ScriptedModel, workspace: Path
) -> None:
    body = conversation(server, "served-wrong", workspace)
    body["agent"] = {**body["agent"], "rl": {"max_turnz": 3}}  # type: ignore[dict-item]
    refused = httpx.post(f"{agent_server}/api/conversations", json=body, timeout=60)
    assert refused.status_code == 422 and "max_turnz" in refused.text and "available: " in refused.text


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


def corrects(body: dict[str, Any]) -> dict[str, Any]:
    """Looks, then writes what is right or what is not, as the seed says."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    if not body.get("tools"):
        return reply("Yes" if "a + b" in json.dumps(body["messages"]) else "No")
    if turn == 0:
        return reply("I look.", call(TERMINAL, {"command": "pwd; ls /workspace"}, "call-1"))
    if turn == 1:
        new = "a + b" if body["seed"] % 2 else "a * b"
        edit = {"command": "str_replace", "path": "/workspace/calc.py", "old_str": "a - b", "new_str": new}
        return reply(None, call(EDITOR, edit, f"call-{new}"))
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
    reported = play(agent_server, make_agent(make_llm(server, "remote"), tmp_path / "store", rl=rl), workspace)
    [episode] = await stored(tmp_path / "store")
    assert (episode.stop, episode.failure) == (StopReason.TERMINATED, None)
    texts = [message.content or "" for message in episode.messages() if message.role == "tool"]
    assert texts[0].startswith("/workspace\ncalc.py")
    assert "a + b" in (workspace / "calc.py").read_text() and "+    return a + b" in str(episode.evidence["git_patch"])
    simulated = [node for node in episode.nodes if node.simulated and "a * b" in str(node.message.tool_calls)]
    assert simulated, "what was not chosen was executed in a fork only"
    assert all(node.tokens is not None for node in episode.sampled())
    assert reported == f"recorded in {tmp_path / 'store'} on {socket.gethostname()} as {episode.id[:8]}"
