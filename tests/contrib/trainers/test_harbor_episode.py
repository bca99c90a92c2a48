"""An episode of OpenHands V1 whose tools work in a container of another program, as Harbor's agent has it played."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from folder_container import FolderContainer, Ran
from needs import needs_bubblewrap
from scripted_model import LOGPROB, ScriptedModel, call, prompt_ids, says, serve

from openhands_rl_plugin.config.host import installed_hosts
from openhands_rl_plugin.config.rollout import PlayOptions
from openhands_rl_plugin.contrib.trainers.harbor_episode import ContainerEpisode, roll_out_in_container, served
from openhands_rl_plugin.contrib.trainers.rows import rollout_details
from openhands_rl_plugin.environments.workspace.task_workspace import ContainerPlace
from openhands_rl_plugin.trajectories.exchange.events import read_atif
from openhands_rl_plugin.trajectories.exchange.foreign import Record
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = [
    needs_bubblewrap,
    pytest.mark.skipif("v1" not in installed_hosts(), reason="needs OpenHands V1"),
]

LOW = {"security_risk": "LOW"}


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with serve() as server:
        yield server


@pytest.fixture
async def container(tmp_path: Path) -> FolderContainer:
    return FolderContainer(tmp_path / "root")


@pytest.fixture
async def place(container: FolderContainer) -> AsyncIterator[ContainerPlace]:
    async with served(container) as socket:
        yield ContainerPlace(socket=socket, folder="/tmp/.session")


def terminal(command: str, id: str, **more: Any) -> dict[str, Any]:
    return says(None, call("terminal", {"command": command, **LOW, **more}, id))


def editor(command: str, path: str, id: str, **more: Any) -> dict[str, Any]:
    return says(None, call("file_editor", {"command": command, "path": path, **LOW, **more}, id))


def finish() -> dict[str, Any]:
    return says(None, call("finish", {"message": "Done.", **LOW}, "call-end"))


def episode(model: ScriptedModel, place: ContainerPlace, tmp_path: Path, **options: Any) -> ContainerEpisode:
    (tmp_path / "logs").mkdir(exist_ok=True)
    played = PlayOptions(base_url=model.url, model="policy", max_turns=12, timeout=100, **options)
    return ContainerEpisode(
        name="hello",
        instruction="Write a greeting.",
        place=place,
        options=played,
        documents=tmp_path / "logs",
        store=tmp_path / "store",
    )


async def test_the_tools_of_openhands_work_in_the_container(
    model: ScriptedModel, place: ContainerPlace, container: FolderContainer, tmp_path: Path
):
    model.script(
        "policy",
        [
            terminal('pwd; cd /tmp; export NAME=world; echo "$GREETING"', "1"),
            editor("create", "/app/hello.txt", "2", file_text="Hello, wurld!\n"),
            editor("str_replace", "/app/hello.txt", "3", old_str="wurld", new_str="world"),
            editor("undo_edit", "/app/hello.txt", "4"),
            editor("view", "/app", "5"),
            editor("view", "hello.txt", "6"),
            editor("create", "/usr/no.txt", "7", file_text="x"),
            terminal('pwd; sed -i "s/wurld/$NAME/" /app/hello.txt', "8"),
            finish(),
        ],
    )
    played = await roll_out_in_container(episode(model, place, tmp_path))
    assert (played.failure, played.reward, played.off_policy, played.turns) == (None, None, "", 9)
    assert (container.root / "app/hello.txt").read_text() == "Hello, world!\n"
    told = {each.tool_call_id: each.content or "" for each in played.messages if each.role == "tool"}
    assert told["1"].startswith("/app\nHello, world!\n") and "[Current working directory: /tmp]" in told["1"]
    assert "created successfully at: /app/hello.txt" in told["2"] and "Hello, world!" in told["3"]
    assert "undone successfully" in told["4"] and "/app/hello.txt" in told["5"]
    assert "/app/hello.txt" in told["6"], "what is meant is named as the container has it"
    assert "Read-only file system" in told["7"] and told["8"].startswith("/tmp")
    assert not (container.root / "tmp/.session").exists()
    everything = json.dumps([each.model_dump(mode="json") for each in played.messages])
    assert "openhands-rl" not in everything, "no path of this machine is told to the model"

    (detail,) = rollout_details(played.segments)
    sent = [prompt_ids(body["messages"]) for body in model.requests["policy"]]
    assert detail["prompt_token_ids"] == sent, "whole prompts, as the server had them"
    assert [len(each) for each in detail["logprobs"]] == [len(each) for each in detail["completion_token_ids"]]
    assert {each for turn in detail["logprobs"] for each in turn} == {LOGPROB}

    document = json.loads((tmp_path / "logs/trajectory.json").read_text())
    assert document["schema_version"] == "ATIF-v1.8"
    steps = [each["metrics"] for each in document["steps"] if each["source"] == "agent"]
    assert [each["prompt_token_ids"] for each in steps] == sent
    assert [each["completion_token_ids"] for each in steps] == detail["completion_token_ids"]
    assert [each["logprobs"] for each in steps] == detail["logprobs"]
    back = read_atif(Record(document))
    assert [each.content for each in back.trajectory.messages()] == [each.content for each in played.messages]
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        kept, _ = await storage.get(played.trajectory_id)
    assert kept.evidence["git_patch"] is None and kept.task.instruction == "Write a greeting."


async def test_a_container_that_fails_is_a_failed_episode_whatever_the_agent_makes_of_it(
    model: ScriptedModel, place: ContainerPlace, container: FolderContainer, tmp_path: Path
):
    real = container.exec

    async def failing(command: str, *, timeout_sec: float | None = None) -> Ran:
        if "/run" in command:
            raise RuntimeError("the sandbox is gone")
        return await real(command, timeout_sec=timeout_sec)

    container.exec = failing  # pyright: ignore[reportAttributeAccessIssue]
    model.script("policy", [terminal("pwd", "1"), finish()])
    played = await roll_out_in_container(episode(model, place, tmp_path))
    assert played.failure is not None and played.segments == ()
    assert (played.failure.kind.value, played.failure.boundary) == ("infrastructure", "container")
    assert "the sandbox is gone" in played.failure.message
