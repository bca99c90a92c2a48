"""``[rl.workspace] prompt = "compact"`` in conversations of the SDK: a runner's, and a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from compact_play import check_both_prompts, check_one_sequence
from needs import needs_bubblewrap
from scripted_model import ScriptedModel, call, reply
from sdk_play import EDITOR, TERMINAL, finish, make_agent, make_llm, run_task, stored, think

from openhands_rl_plugin.config.rl import PromptName
from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.records import prompt_of
from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.hosts.v1 import RLAgent

TOOLS = {"editor": EDITOR, "shell": TERMINAL}
COMPACT = {"workspace": {"isolation": "none", "prompt": "compact"}}


@needs_bubblewrap
async def test_a_repair_succeeds_with_both_prompts(server: ScriptedModel, tmp_path: Path) -> None:
    await check_both_prompts(server, tmp_path, **TOOLS)


@needs_bubblewrap
@pytest.mark.parametrize("prompt", ["standard", "compact"])
async def test_an_episode_with_calls_in_the_text_is_one_sequence(
    server: ScriptedModel, tmp_path: Path, prompt: PromptName
) -> None:
    rollout = await check_one_sequence(server, tmp_path, prompt, **TOOLS)
    # The prompt is recorded as it was sent: tools are described in it.
    recorded = [text_of(message.content) for message in rollout.episode.messages()][:2]
    sent = [text_of(message["content"]) for message in rollout.requests[0]["messages"]]
    assert recorded == sent and not rollout.episode.tools


async def test_a_users_own_conversation(server: ScriptedModel, workspace: Path, tmp_path: Path) -> None:
    model = "own-compact"
    view = call(EDITOR, {"command": "view", "path": str(workspace / "calc.py")}, "call-1")
    # It does not see ``think``, and may use it all the same.
    server.script(model, [reply("I look.", view), think("Well.", "call-2"), finish()])
    llm = make_llm(server, model, log_completions=True, log_completions_folder=str(tmp_path / "log"))
    agent = make_agent(llm, tmp_path / "store", rl=COMPACT)
    again = RLAgent.model_validate(agent.model_dump(context={"expose_secrets": True}))
    run_task(again, workspace, task="Look.")
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED and prompt_of(episode) == "compact"
    for request in server.requests[model]:
        assert {tool["function"]["name"] for tool in request["tools"]} == {TERMINAL, EDITOR, "finish"}
        assert "OpenHands agent" in (text_of(request["messages"][0]["content"]) or "")
    assert list(tmp_path.glob("log/*.json"))


async def test_a_prompt_of_the_users_own_stays(server: ScriptedModel, workspace: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.j2"
    file.write_text("Speak like a pirate.")
    server.script("pirate", [finish()])
    agent = make_agent(make_llm(server, "pirate"), tmp_path / "store", rl=COMPACT, system_prompt_filename=str(file))
    run_task(agent, workspace, task="Ahoy.")
    [request] = server.requests["pirate"]
    instructions = text_of(request["messages"][0]["content"]) or ""
    assert instructions.startswith("Speak like a pirate.\nsecurity_risk: ")
