"""``[rl.workspace] prompt = "compact"`` in conversations of the SDK: a runner's, and a user's own."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from agent_server_process import NO_AGENTS_OF_OTHERS, running_agent_server, takes_agents_of_others
from compact_ends import COMMANDS, TASK, at_an_end, check_command, check_first_request, write_config
from compact_play import check_both_prompts, check_offered_tools, check_one_sequence, check_repaired_call, undescribed
from needs import needs_bubblewrap
from scripted_model import ScriptedModel, call, says
from sdk_play import EDITOR, TERMINAL, converse, finish, make_agent, make_llm, stored, think
from test_agent_server import conversation, events_until_ended

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings, WorkspaceSettings
from openhands_rl_plugin.config.workspace import PromptName
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.records import prompt_of
from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.hosts.pool import local_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v1 import RLAgent

TOOLS = {"editor": EDITOR, "shell": TERMINAL}
COMPACT = {"workspace": {"isolation": "none", "prompt": "compact"}}


@needs_bubblewrap
@pytest.mark.parametrize("native", [True, False], ids=["native tool calls", "calls in the text"])
async def test_a_repair_succeeds_with_both_prompts(server: ScriptedModel, tmp_path: Path, native: bool) -> None:
    await check_both_prompts(server, tmp_path, native=native, **TOOLS)


@needs_bubblewrap
@pytest.mark.parametrize("prompt", ["standard", "compact"])
async def test_an_episode_with_calls_in_the_text_is_one_sequence(
    server: ScriptedModel, tmp_path: Path, prompt: PromptName
) -> None:
    played = await check_one_sequence(server, tmp_path, prompt, **TOOLS)
    # The prompt is recorded as it was sent: tools are described in it.
    recorded = [text_of(message.content) for message in played.episode.messages()][:2]
    sent = [text_of(message["content"]) for message in played.requests[0]["messages"]]
    assert recorded == sent and not played.episode.tools


@needs_bubblewrap
async def test_a_call_that_was_repaired_is_shown_as_the_host_says_it(server: ScriptedModel, tmp_path: Path) -> None:
    await check_repaired_call(server, tmp_path, **TOOLS)


@needs_bubblewrap
async def test_the_tools_are_the_standard_ones_and_all_is_described(server: ScriptedModel, tmp_path: Path) -> None:
    offered = await check_offered_tools(server, tmp_path, **TOOLS)
    [editor] = [tool["function"]["description"] for tool in offered if tool["function"]["name"] == EDITOR]
    assert editor.endswith("Project: /workspace/repository")


@pytest.mark.parametrize("logged", [False, True], ids=["", "with a log of completions"])
async def test_a_users_own_conversation(server: ScriptedModel, workspace: Path, tmp_path: Path, logged: bool) -> None:
    model = f"own-compact-{logged}"
    view = call(EDITOR, {"command": "view", "path": str(workspace / "calc.py")}, "call-1")
    # It is not told of ``think``, and may use it all the same.
    server.script(model, [says("I look.", view), think("Well.", "call-2"), finish()])
    llm = make_llm(server, model, log_completions=logged, log_completions_folder=str(tmp_path / "log"))
    agent = make_agent(llm, tmp_path / "store", rl=COMPACT)
    again = RLAgent.model_validate(agent.model_dump(context={"expose_secrets": True}))
    conversation = converse(again, workspace)
    conversation.send_message("Look.")
    conversation.run()
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED and prompt_of(episode) == "compact"
    for request in server.requests[model]:
        assert {tool["function"]["name"] for tool in request["tools"]} == {TERMINAL, EDITOR, "finish"}
        assert "OpenHands agent" in (text_of(request["messages"][0]["content"]) or "")
        assert not undescribed(request)
    assert list(tmp_path.glob("log/*.json")) or not logged


async def test_a_prompt_of_the_users_own_stays(server: ScriptedModel, workspace: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.j2"
    file.write_text("Speak like a pirate.")
    server.script("pirate", [finish()])
    agent = make_agent(make_llm(server, "pirate"), tmp_path / "store", rl=COMPACT, system_prompt_filename=str(file))
    conversation = converse(agent, workspace)
    conversation.send_message("Ahoy.")
    conversation.run()
    conversation.close()
    [request] = server.requests["pirate"]
    said = text_of(request["messages"][0]["content"]) or ""
    assert said.startswith("Speak like a pirate.\nsecurity_risk: ") and not undescribed(request)


def test_other_agents_have_their_own_prompt() -> None:
    settings = RLSettings(
        serving=ServingSettings(base_url="http://127.0.0.1:1", model="m"), workspace=WorkspaceSettings(prompt="compact")
    )
    with pytest.raises(ConfigError, match=r"\[rl.workspace\] prompt: .* --agent RLAgent"):
        local_runner(settings, HostOptions(environment_mode=False, agent="Agent"))


@at_an_end
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_sends_the_short_instructions(name: str, server: ScriptedModel, tmp_path: Path) -> None:
    pytest.importorskip("torch" if name == "loop" else "openhands.sdk")
    check_command(server, tmp_path / name, name)


@at_an_end
@pytest.mark.skipif(not takes_agents_of_others(), reason=NO_AGENTS_OF_OTHERS)
async def test_the_agent_server_sends_them(server: ScriptedModel, tmp_path: Path) -> None:
    folder = tmp_path / "remote"
    write_config(server, folder, "remote")
    body = conversation(server, "remote", folder / "project")
    body["agent"]["rl"]["workspace"]["prompt"] = "compact"  # type: ignore[index]
    body["initial_message"]["content"][0]["text"] = TASK  # type: ignore[index]
    with running_agent_server(folder) as url:
        made = httpx.post(f"{url}/api/conversations", json=body, timeout=60)
        assert made.status_code == 201, made.text
        await events_until_ended(url, made.json()["id"])
    check_first_request(server.requests["remote"], project=str(folder / "project"))
