"""An environment behind OpenHands' runtime interface, over real HTTP servers and in process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from openhands.core.config import OpenHandsConfig
from openhands.events import EventSource
from openhands.events.action import CmdRunAction, FileReadAction, MessageAction
from openhands.events.action.mcp import MCPAction
from openhands.events.observation import ErrorObservation
from openhands.events.observation.mcp import MCPObservation
from openhands.events.stream import EventStream
from openhands.llm.llm_registry import LLMRegistry
from openhands.storage.memory import InMemoryFileStore
from small_shop import running_shop

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    FailureKind,
    StrategySpec,
    Task,
)
from openhands_rl_plugin.hosts.shared.standalone_run import TASK_INDEX_VARIABLE, task_from_environment_variable
from openhands_rl_plugin.hosts.v0 import environment_runtime
from openhands_rl_plugin.hosts.v0.environment_runtime import (
    RESET_TOOL,
    STEP_TOOL,
    EnvironmentReply,
    EnvironmentRuntime,
)
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.session.session import Session, bind_episode


@pytest.fixture(scope="module")
def shop() -> Iterator[str]:
    with running_shop() as url:
        yield url


def settings_for(url: str, **more) -> RLSettings:
    host, port = url.rsplit(":", 1)
    return RLSettings(env_server_base=host, env_port=int(port), **more)


def make_runtime(settings: RLSettings | None, task: Task | None = None) -> EnvironmentRuntime:
    config = OpenHandsConfig(enable_browser=False)

    def make() -> EnvironmentRuntime:
        stream = EventStream("session", InMemoryFileStore())
        return EnvironmentRuntime(
            config=config, event_stream=stream, llm_registry=LLMRegistry(config), headless_mode=True
        )

    if settings is None or task is None:
        return make()
    request = EpisodeRequest(task=task, run_id="run", group_id="group")
    episode = Session(
        request,
        settings,
        strategy=StandardReActStrategy(),
        strategy_spec=StrategySpec(name="StandardReAct"),
        base_model="m",
        environment_mode=True,
    )
    with bind_episode(episode):
        return make()


@pytest.fixture
def runtime(shop: str) -> Iterator[EnvironmentRuntime]:
    runtime = make_runtime(settings_for(shop), Task(id="t", environment="webshop", data={"idx": 3}))
    yield runtime
    runtime.close()
    runtime.event_stream.close()


def send(runtime: EnvironmentRuntime, name: str, **arguments) -> EnvironmentReply:
    observation = asyncio.run(runtime.call_tool_mcp(MCPAction(name=name, arguments=arguments)))
    assert isinstance(observation, MCPObservation) and observation.name == name
    return EnvironmentReply.model_validate_json(observation.content)


def act(runtime: EnvironmentRuntime, action: str) -> EnvironmentReply:
    return send(runtime, STEP_TOOL, content=f"Thought: go on\nAction: {action}")


def test_an_episode_to_its_end(runtime: EnvironmentRuntime):
    opening = send(runtime, RESET_TOOL)
    assert [message.role for message in opening.messages] == ["system", "user"] and opening.evidence is None
    results = act(runtime, "search[shoes]")
    page = results.messages[0].content or ""
    product = next(part for part in page.splitlines() if part.startswith("B0"))
    act(runtime, f"click[{product}]")
    end = act(runtime, "click[Buy Now]")
    assert end.terminated and end.failure is None and 0.0 <= end.reward <= 1.0
    assert end.evidence is not None and end.evidence["done"] is True
    assert runtime.conclude() == (end.evidence, None)


def test_a_malformed_answer_is_the_environments_to_answer(runtime: EnvironmentRuntime):
    send(runtime, RESET_TOOL)
    reply = send(runtime, STEP_TOOL, content="no action here")
    assert reply.failure is None and reply.reward == 0.0 and reply.messages


def test_the_evidence_of_an_unfinished_episode_is_gathered_at_the_end(runtime: EnvironmentRuntime):
    send(runtime, RESET_TOOL)
    act(runtime, "search[shoes]")
    evidence, failure = runtime.conclude()
    assert failure is None and evidence is not None and evidence["done"] is False and evidence["steps"] == 1


def test_other_actions_are_refused_clearly(runtime: EnvironmentRuntime):
    for action in (CmdRunAction("ls"), FileReadAction("/etc/passwd")):
        observation = runtime.run_action(action)
        assert isinstance(observation, ErrorObservation) and STEP_TOOL in observation.content
    other = asyncio.run(runtime.call_tool_mcp(MCPAction(name="other_tool")))
    assert isinstance(other, ErrorObservation) and "other_tool" in other.content


def test_a_server_that_dies_in_mid_episode():
    with running_shop() as url:
        runtime = make_runtime(settings_for(url), Task(id="t", environment="webshop", data={"idx": 0}))
        send(runtime, RESET_TOOL)
        act(runtime, "search[shoes]")
    failure = act(runtime, "search[boots]").failure
    assert failure is not None and failure.kind is FailureKind.INFRASTRUCTURE and failure.boundary == "environment.step"
    evidence, why = runtime.conclude()
    assert evidence is not None and evidence["steps"] == 1 and why == failure, "what it has of itself is kept"
    runtime.close()
    runtime.event_stream.close()


def test_plain_openhands_runs_take_their_task_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TASK_INDEX_VARIABLE, "12")
    runtime = make_runtime(None)
    assert runtime._task == Task(id="webshop-12", environment="webshop", data={"idx": 12})
    runtime.close()
    runtime.event_stream.close()
    monkeypatch.setenv(TASK_INDEX_VARIABLE, "twelve")
    with pytest.raises(ConfigError, match="whole number"):
        task_from_environment_variable(RLSettings())


def test_the_users_words_reach_the_model_in_a_plain_run(shop: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment_runtime, "host_settings", lambda agent_config, config: settings_for(shop))
    runtime = make_runtime(None)
    runtime.event_stream.add_event(MessageAction("buy something soft"), EventSource.USER)
    runtime.event_stream.add_event(MCPAction(name=RESET_TOOL), EventSource.AGENT)
    deadline = time.monotonic() + 10
    while not isinstance(last := runtime.event_stream.get_latest_event(), MCPObservation):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    opening = EnvironmentReply.model_validate_json(last.content)
    assert "Task: buy something soft" in (opening.messages[0].content or "")
    runtime.close()
    runtime.event_stream.close()
