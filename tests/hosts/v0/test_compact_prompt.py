"""``[rl.workspace] prompt = "compact"`` with OpenHands V0's own controller and CodeAct's tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compact_play import check_both_prompts, check_one_sequence, check_repaired_call
from needs import needs_bubblewrap
from openhands.core.config import AgentConfig, LLMConfig, OpenHandsConfig
from openhands.core.config.extended_config import ExtendedConfig
from openhands.core.message import TextContent
from openhands.events.action import MessageAction
from openhands.events.event import EventSource
from openhands.events.observation.agent import MicroagentKnowledge, RecallObservation, RecallType
from openhands.llm.llm_registry import LLMRegistry
from pydantic import SecretStr
from scripted_model import ScriptedModel

from openhands_rl_plugin.config.rl import PromptName, RLSettings, ServingSettings, WorkspaceSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.hosts.pool import local_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v0.agent import RLAgent

TOOLS = {"editor": "str_replace_editor", "shell": "execute_bash"}


@needs_bubblewrap
async def test_a_repair_succeeds_with_both_prompts(server: ScriptedModel, tmp_path: Path) -> None:
    standard, compact = await check_both_prompts(server, tmp_path, **TOOLS)
    # After the task the model sees the same, but for folder and date.
    texts = [[str(message.content) for message in rollout.episode.messages()][2:] for rollout in (standard, compact)]
    assert "<RUNTIME_INFORMATION>" in texts[0].pop(0) and texts[0] == texts[1]


@needs_bubblewrap
@pytest.mark.parametrize("prompt", ["standard", "compact"])
async def test_an_episode_with_calls_in_the_text_is_one_sequence(
    server: ScriptedModel, tmp_path: Path, prompt: PromptName
) -> None:
    await check_one_sequence(server, tmp_path, prompt, **TOOLS)


@needs_bubblewrap
async def test_a_call_that_was_repaired_is_shown_as_the_host_writes_it(server: ScriptedModel, tmp_path: Path) -> None:
    await check_repaired_call(server, tmp_path, **TOOLS)


def test_of_the_workspace_it_shows_what_somebody_has_set(server: ScriptedModel, tmp_path: Path) -> None:
    server.script("set", [])
    rl = {"workspace": {"prompt": "compact"}, "storage": {"path": str(tmp_path)}}
    llm = LLMConfig(model="openai/set", base_url=server.url, api_key=SecretStr("none"))
    config = OpenHandsConfig(llms={"llm": llm}, extended=ExtendedConfig.model_validate({"rl": rl}))
    agent = RLAgent(AgentConfig(enable_mcp=False), LLMRegistry(config))
    assert [tool["function"]["name"] for tool in agent.tools] == ["execute_bash", "finish", "str_replace_editor"]
    assert (message := agent.get_system_message()) is not None and message.tools == agent.tools

    def shown(task: str = "Fix it.", **fields: Any) -> list[str]:
        asked = MessageAction(task)
        asked._source = EventSource.USER  # type: ignore[attr-defined]
        usual = {"recall_type": RecallType.WORKSPACE_CONTEXT, "date": "2026-11-27", "content": "added"}
        seen = RecallObservation(**{**usual, **fields})
        messages = agent._get_messages([asked, seen], asked, set())
        texts = ["".join(part.text for part in each.content if isinstance(part, TextContent)) for each in messages]
        return [text.strip() for text in texts[1:]]

    assert shown(working_dir="/workspace") == ["Fix it."]
    skill = MicroagentKnowledge(name="go", trigger="fix", content="Use gofmt.")
    [_, known] = shown(working_dir="/workspace", microagent_knowledge=[skill])
    assert known.startswith("<EXTRA_INFO>") and "Use gofmt." in known
    [_, text] = shown(repo_name="me/shop", repo_directory="/workspace/shop", repo_instructions="Run make test.")
    assert "repository me/shop" in text and "Run make test." in text and "2026-11-27" not in text
    [_, text] = shown(custom_secrets_descriptions={"TOKEN": "for it"}, conversation_instructions="Open a request.")
    assert "**$TOKEN**: for it" in text and "Open a request." in text and "2026-11-27" not in text
    [_, text] = shown(runtime_hosts={"work-1": 8011}, additional_agent_instructions="Answer in French.")
    assert "work-1 (port 8011)" in text and "Answer in French." in text


def test_other_agents_have_their_own_prompt() -> None:
    settings = RLSettings(
        serving=ServingSettings(base_url="http://127.0.0.1:1", model="m"), workspace=WorkspaceSettings(prompt="compact")
    )
    with pytest.raises(ConfigError, match=r"\[rl.workspace\] prompt: .* --agent RLAgent"):
        local_runner(settings, HostOptions(environment_mode=False, agent="CodeActAgent"))
