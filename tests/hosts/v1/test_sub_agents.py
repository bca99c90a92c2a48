"""Sub-agents of the SDK's delegation tools: each is an episode of its own, which names its parent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from needs import needs_bubblewrap
from openhands.sdk import LLM, Agent, Tool, register_agent
from openhands.sdk.subagent.registry import _reset_registry_for_tests  # type: ignore[attr-defined]
from scripted_model import ScriptedModel, call, reply
from sdk_play import EDITOR, TERMINAL, finish, make_agent, make_llm, run_task, stored

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.records import TrajectoryFilter, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, StopReason, Task, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.pool import open_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v1 import runs
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

import_module("openhands.tools.task")
TASK_TOOLS = "task_tool_set"
ASKED = "Say where you are."


@pytest.fixture(autouse=True)
def researcher() -> Iterator[None]:
    def make(llm: LLM) -> Agent:
        return Agent(llm=llm, tools=[Tool(name=TERMINAL), Tool(name=EDITOR)])

    register_agent(name="researcher", factory_func=make, description="Looks around.")
    yield
    _reset_registry_for_tests()


def delegating(model: str, server: ScriptedModel, look: dict[str, Any]) -> None:
    """The parent gives one task away; the sub-agent looks and finishes."""

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        mine = ASKED in json.dumps(next(each for each in body["messages"] if each["role"] == "user"))
        turn = sum(each["role"] == "assistant" for each in body["messages"])
        if turn:
            return finish("It is done." if mine else "Thanks.", id=f"call-f{mine}")
        if mine:
            return reply("I look.", look)
        task = {"prompt": ASKED, "subagent_type": "researcher", "description": "look"}
        return reply("I delegate.", call("task", task, "call-p"))

    server.policies[model] = policy


def parent_and_child(episodes: list[Trajectory]) -> tuple[Trajectory, Trajectory]:
    [child] = [each for each in episodes if "sub_agent" in each.task.data]
    [parent] = [each for each in episodes if each is not child]
    return parent, child


@pytest.mark.parametrize("isolation", ["none", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def test_a_task_is_an_episode_that_names_its_parent(
    isolation: str, server: ScriptedModel, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sandboxed = isolation == "bubblewrap"
    listing = call(EDITOR, {"command": "view", "path": str(workspace)}, "call-s")
    delegating("delegates", server, call(TERMINAL, {"command": "pwd"}, "call-s") if sandboxed else listing)
    rl = {"workspace": {"isolation": isolation}, "sampling": {"seed": 3}}
    agent = make_agent(make_llm(server, "delegates"), tmp_path / "store", tools=[TERMINAL, TASK_TOOLS], rl=rl)
    conversation = run_task(agent, workspace, task="Give it away.")
    parent, child = parent_and_child(asyncio.run(stored(tmp_path / "store")))
    assert child.task.data == {"sub_agent": {"parent": parent.id, "kind": "researcher"}}
    for episode in (parent, child):
        assert (episode.stop, episode.failure, len(episode.acted())) == (StopReason.TERMINATED, None, 2)
        assert [node.tokens.extends for node in episode.sampled() if node.tokens] == [False, True]
    assert child.run_id != parent.run_id and child.group_id != parent.group_id
    texts = [message.content or "" for message in child.messages() if message.role == "tool"]
    assert ("/workspace" if sandboxed else str(workspace)) in texts[0]
    texts = [message.content or "" for message in parent.messages() if message.role == "tool"]
    assert "It is done." in texts[0], "as with the stock agent"
    spent = conversation.conversation_stats.get_combined_metrics().accumulated_token_usage
    used = [episode.usage.completion_tokens for episode in (parent, child)]
    assert spent is not None and spent.completion_tokens == sum(used)

    store = str(tmp_path / "store")
    assert cli.main(["show", store, child.id]) == 0
    assert f"sub-agent researcher of {parent.id}" in capsys.readouterr().out
    assert cli.main(["show", store, child.id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"]["data"]["sub_agent"]["parent"] == parent.id
    exported = tmp_path / "episodes.jsonl"
    assert cli.main(["export", store, "--format", "trajectories", "--out", str(exported)]) == 0
    assert cli.main(["import", str(exported), "--into", str(tmp_path / "again")]) == 0
    assert parent_and_child(asyncio.run(stored(tmp_path / "again")))[1].task.data == child.task.data


@needs_bubblewrap
@pytest.mark.parametrize("agent", ["RLAgent", "Agent"])
async def test_under_a_runner_it_is_stored_where_the_parent_is(
    agent: str, server: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delegating("runner", server, call(TERMINAL, {"command": "echo more > found.txt; pwd"}, "call-s"))
    # Runners offer the terminal and the editor only.
    tools = [Tool(name=TERMINAL), Tool(name=EDITOR), Tool(name=TASK_TOOLS)]
    made = runs.RLAgent
    monkeypatch.setattr(runs, "RLAgent", lambda **fields: made(**{**fields, "tools": tools}))
    repository = tmp_path / "repository"
    repository.mkdir()
    serving, storage = ServingSettings(base_url=server.url, model="runner"), FileTrajectoryStorage(tmp_path / "store")
    task = Task(id="t", environment="suite", instruction="Give it away.", split="heldout", limits=Limits(max_turns=4))
    request = EpisodeRequest(task=task, run_id="r", group_id="r/t")
    options = HostOptions(environment_mode=False, agent=agent)
    place = TaskWorkspace(root=tmp_path, repository="repository")
    async with open_runner(RLSettings(serving=serving), options, storage=storage) as runner:
        episode = await runner.run(request, place)
    parent, child = parent_and_child([each async for each, _ in storage.find(TrajectoryFilter(finished=None))])
    assert parent.id == episode.id == trajectory_id(request) and parent.stop is StopReason.TERMINATED
    assert child.task.data == {"sub_agent": {"parent": parent.id, "kind": "researcher"}}
    assert (child.stop, child.failure, child.strategy) == (StopReason.TERMINATED, None, parent.strategy)
    assert (child.task.split, child.task.limits, child.task.environment) == ("heldout", task.limits, "suite")
    assert [each.id async for each, _ in storage.find(TrajectoryFilter(run_id="r"))] == [parent.id]
    texts = [message.content or "" for message in child.messages() if message.role == "tool"]
    assert "/workspace/repository" in texts[0] and (repository / "found.txt").read_text() == "more\n"
    assert all("found.txt" in str(each.evidence["git_patch"]) for each in (parent, child))
    await storage.close()
