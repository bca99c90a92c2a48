"""A prefix replayed by OpenHands' controller, in a workspace and in the shop: executed, compared, and then context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from needs import needs_bubblewrap
from scripted_model import ScriptedModel, call, says, serve

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings, WorkspaceSettings
from openhands_rl_plugin.config.workspace import PromptName
from openhands_rl_plugin.contrib.webshop import running_webshop
from openhands_rl_plugin.core.acted import is_replayed
from openhands_rl_plugin.core.records import prefix_of
from openhands_rl_plugin.core.types import EpisodeRequest, Node, StopReason, Task, Trajectory
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.hosts.v0.driver import ControllerRunner
from openhands_rl_plugin.rollout.prefix import begun_with, can_begin_others, has_differed, prefix_nodes

pytestmark = needs_bubblewrap

TASK = Task(id="t", environment="workspace", instruction="Write it.")
REQUEST = EpisodeRequest(task=TASK, run_id="r", group_id="g", seed=11)
COMMANDS = ("echo first > answer.txt", "cat answer.txt", "echo second >> answer.txt; echo passed in 0.$(date +%N)s")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


def worker(native: bool) -> Any:
    """The commands one after the other, then the end."""

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if turn < len(COMMANDS):
            name, arguments = "execute_bash", {"command": COMMANDS[turn], "security_risk": "LOW"}
        else:
            name, arguments = "finish", {"message": "done"}
        if native:
            return says(None, call(name, arguments, f"call{turn}-{body['seed']}"))
        lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
        return says(f"I go on.\n<function={name}>\n{lines}</function>")

    return policy


async def play(server: ScriptedModel, native: bool, prompt: PromptName, request: EpisodeRequest) -> Trajectory:
    server.policies["worker"] = worker(native)
    settings = RLSettings(
        serving=ServingSettings(base_url=server.url, model="worker", request_timeout=20.0),
        workspace=WorkspaceSettings(prompt=prompt),
        max_turns=6,
        max_obs_length=4096,
    )
    runner = ControllerRunner(settings, HostOptions(environment_mode=False, native_tool_calling=native))
    try:
        return await runner.run(request)
    finally:
        await runner.close()


@pytest.mark.parametrize(
    ("native", "prompt"),
    [(True, "standard"), (False, "standard"), (False, "compact")],
    ids=["native tool calls", "calls in the text", "compact"],
)
async def test_a_session_goes_on_from_a_prefix(server: ScriptedModel, native: bool, prompt: PromptName) -> None:
    source = await play(server, native, prompt, REQUEST)
    assert source.stop is StopReason.TERMINATED and can_begin_others(source)
    asked = len(server.requests["worker"])
    begun = begun_with(REQUEST, prefix_nodes(source, 3, good=True))
    played = await play(server, native, prompt, begun)
    assert (played.stop, played.failure) == (StopReason.TERMINATED, None)
    assert [is_replayed(node) for node in played.sampled()] == [True, True, True, False]
    assert (note := prefix_of(played)) is not None and (note.trajectory, note.turns, note.of) == (source.id, 3, 4)
    assert len(server.requests["worker"]) - asked == 1, "the model is asked for the rest only"
    assert "first" in str(played.messages()) and "+second" in str(played.evidence["git_patch"])
    first = next(node for node in played.sampled() if not is_replayed(node))
    assert first.tokens is not None and not first.tokens.extends, "its prompt has all that was said before"
    sent = server.requests["worker"][asked]["messages"]
    assert "cat answer.txt" in json.dumps(sent), "what was replayed is in its prompt"
    assert source.messages()[:6] == played.messages()[:6] and source.messages() != played.messages(), "but for a time"


def shopper(body: dict[str, Any]) -> dict[str, Any]:
    """Searches, then turns pages."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    return says(("search[soft cotton socks]", "click[Next >]", "click[< Prev]")[turn])


async def test_an_environment_goes_on_from_a_prefix(server: ScriptedModel) -> None:
    server.policies["shopper"] = shopper
    serving = ServingSettings(base_url=server.url, model="shopper", request_timeout=20.0)
    with running_webshop() as shop:
        host, port = shop.rsplit(":", 1)
        where = {"env_server_base": host, "env_port": int(port), "react_format": False}
        runner = ControllerRunner(RLSettings.model_validate({"serving": serving, "max_turns": 3, **where}))
        task = Task(id="shop", environment="webshop", data={"idx": 1})
        source = await runner.run(EpisodeRequest(task=task, run_id="r", group_id="g"))
        begun = begun_with(EpisodeRequest(task=task, run_id="r", group_id="g"), prefix_nodes(source, 2, good=False))
        played = await runner.run(begun)
        await runner.close()
    assert (played.failure, played.messages()) == (None, source.messages())
    assert [is_replayed(node) for node in played.sampled()] == [True, True, False]
    assert played.usage.calls == 1 and played.stop is StopReason.MAX_TURNS


async def test_a_workspace_that_answers_otherwise_ends_the_replay(server: ScriptedModel) -> None:
    source = await play(server, True, "standard", REQUEST)
    nodes = prefix_nodes(source, 3, good=True)
    at = next(at for at, node in enumerate(nodes) if node.message.role == "tool" and "first" in str(node.message))
    other = nodes[at].message.model_copy(update={"content": "another"})
    changed: tuple[Node, ...] = (*nodes[:at], nodes[at].model_copy(update={"message": other}), *nodes[at + 1 :])
    asked = len(server.requests["worker"])
    played = await play(server, True, "standard", begun_with(REQUEST, changed))
    assert has_differed(played) and played.stop is StopReason.ERROR
    assert len(server.requests["worker"]) == asked, "nothing was sampled for it"
