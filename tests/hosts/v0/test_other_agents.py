"""OpenHands' own agents through the driver: nothing is changed for them, and their episodes are recorded."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from needs import needs_bubblewrap
from scripted_model import ScriptedModel, call, refusal, says, serve

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import LAST_ERROR
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    FailureKind,
    Limits,
    SamplingParams,
    StopReason,
    Task,
    Trajectory,
)
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace, WorkspaceMount
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import ControllerRunner

STOCK = HostOptions(
    environment_mode=False,
    agent="CodeActAgent",
    token_ids=False,
    stuck_detection=True,
    llm_retries=1,
    replies=("Go on.\n", "Go on.\nOr give up.\n"),
)
FINISH = says(None, call("finish", {"message": "done"}))


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


def bash(command: str, id: str = "call-1") -> dict:
    return says(None, call("execute_bash", {"command": command, "security_risk": "LOW"}, id))


def request(name: str, **limits) -> EpisodeRequest:
    task = Task(id=name, environment="workspace", instruction=f"task {name}", limits=Limits(max_turns=10, **limits))
    sampling = SamplingParams(temperature=0.25)
    return EpisodeRequest(task=task, run_id="run", group_id=name, seed=7, served_model=None, sampling=sampling)


@asynccontextmanager
async def controller(model: ScriptedModel, name: str, options: HostOptions = STOCK) -> AsyncIterator[ControllerRunner]:
    serving = ServingSettings(base_url=model.url, model=name, request_timeout=20.0)
    runner = ControllerRunner(RLSettings(serving=serving), options)
    yield runner
    await runner.close()


def heard(trajectory: Trajectory, role: str) -> list[str]:
    return [message.content or "" for message in trajectory.messages() if message.role == role]


@pytest.mark.shows("the stock agent, recorded")
async def test_a_stock_agent_is_recorded(model: ScriptedModel):
    model.script("m-plain", [bash("echo one > a.txt; cat a.txt"), says("I think so."), says("Really."), FINISH])
    async with controller(model, "m-plain") as runner:
        played = await runner.run(request("plain"))
    assert (played.stop, played.failure, played.strategy.name) == (StopReason.TERMINATED, None, "CodeActAgent")
    assert [node.message.content for node in played.sampled()][1:3] == ["I think so.", "Really."]
    assert heard(played, "tool")[0].startswith("one\n")
    assert heard(played, "user")[-2:] == ["Go on.\n", "Go on.\nOr give up.\n"]
    assert "+one" in str(played.evidence["git_patch"])
    assert "execute_bash" in str(played.tools[0])
    asked = model.requests["m-plain"]
    assert {(body["temperature"], body["seed"]) for body in asked} == {(0.25, 7)}
    assert not any("logprobs" in body or "return_token_ids" in body for body in asked)
    assert played.usage.calls == len(asked) == 4


async def test_an_answer_that_cannot_be_read_is_kept_beside_the_path(model: ScriptedModel):
    model.script("m-bad", [says(None, call("execute_bash", "{not json")), FINISH])
    async with controller(model, "m-bad") as runner:
        played = await runner.run(request("bad"))
    assert played.stop is StopReason.TERMINATED
    beside = [node for node in played.nodes if "malformed" in node.metadata]
    assert len(beside) == 1 and played.usage.calls == 2
    assert all("malformed" not in node.metadata for node in played.sampled())


async def test_a_loop_is_ended_by_openhands_own_detector(model: ScriptedModel):
    model.script("m-stuck", [bash("echo again", f"call-{number}") for number in range(9)])
    async with controller(model, "m-stuck") as runner:
        played = await runner.run(request("stuck"))
    assert (played.stop, played.failure) == (StopReason.TRUNCATED, None)
    assert "stuck" in str(played.evidence[LAST_ERROR]).lower()


async def test_whose_fault_an_error_was(model: ScriptedModel):
    model.script("m-refuses", [refusal(400, "no such parameter")])
    model.script("m-away", [refusal(503, "too busy")] * 5)
    async with controller(model, "m-refuses") as runner:
        refused = await runner.run(request("refused"))
    async with controller(model, "m-away") as runner:
        away = await runner.run(request("away"))
    assert refused.failure and refused.failure.kind is FailureKind.MODEL
    assert away.failure and away.failure.kind is FailureKind.INFRASTRUCTURE


async def test_iterations_are_the_limit(model: ScriptedModel):
    model.script("m-long", [bash(f"echo {number}", f"call-{number}") for number in range(9)])
    async with controller(model, "m-long") as runner:
        task = request("long").task.model_copy(update={"limits": Limits(max_turns=3)})
        played = await runner.run(request("long").model_copy(update={"task": task}))
    assert (played.stop, len(model.requests["m-long"])) == (StopReason.MAX_TURNS, 3)


async def test_an_agent_that_does_not_exist(model: ScriptedModel):
    with pytest.raises(ConfigError, match="did you mean 'CodeActAgent'"):
        async with controller(model, "m", STOCK.model_copy(update={"agent": "CodeActAgnet"})):
            pass


@needs_bubblewrap
@pytest.mark.parametrize("agent", ["CodeActAgent", "RLAgent"])
async def test_an_episode_in_a_workspace_of_its_own(model: ScriptedModel, tmp_path: Path, agent: str):
    name = f"m-workspace-{agent}"
    show = 'pwd; cat "$NOTE"; git log --oneline; echo fixed > code.py; ls -d /home; ls ..'
    model.script(name, [bash(show), FINISH])
    workspace = repository_workspace(tmp_path)
    async with controller(model, name, STOCK.model_copy(update={"agent": agent})) as runner:
        played = await runner.run(request(f"workspace-{agent}"), workspace)
    said = heard(played, "tool")[0]
    assert said.startswith("/workspace/owner__repo__1.0\na note\n"), said
    assert "the only commit" in said and "owner__repo__1.0" in said
    assert "'/home': No such file" in said, "the host's own files are not shown"
    patch = str(played.evidence["git_patch"])
    assert "--- a/code.py\n+++ b/code.py" in patch and "+fixed" in patch
    assert played.evidence["changed_files"] == {"code.py": "modified"}


def repository_workspace(folder: Path) -> TaskWorkspace:
    directory = folder / "root" / "owner__repo__1.0"
    directory.mkdir(parents=True)
    (directory / "code.py").write_text("broken\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "the only commit"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=directory, check=True)
    note = folder / "elsewhere" / "note.txt"
    note.parent.mkdir()
    note.write_text("a note\n")
    mount = WorkspaceMount(host=note.parent, inside="/opt/notes")
    variables = {"NOTE": "/opt/notes/note.txt"}
    return TaskWorkspace(root=folder / "root", repository=directory.name, mounts=(mount,), variables=variables)
