"""An environment behind OpenHands' runtime interface, over real HTTP servers and in process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from openhands.core.config import OpenHandsConfig
from openhands.core.config.extended_config import ExtendedConfig
from openhands.events.action import CmdRunAction, FileReadAction
from openhands.events.action.mcp import MCPAction
from openhands.events.observation import ErrorObservation
from openhands.events.observation.mcp import MCPObservation
from openhands.events.stream import EventStream
from openhands.llm.llm_registry import LLMRegistry
from openhands.storage.memory import InMemoryFileStore
from small_shop import running_shop

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import FailureKind, JsonObject, Observation, Task
from openhands_rl_plugin.hosts.shared.sessions import TASK_INDEX_VARIABLE, task_from_environment_variable
from openhands_rl_plugin.hosts.v0.runtime import RESET_TOOL, STEP_TOOL, EnvironmentRuntime

TASK = Task(id="t", environment="webshop", data={"idx": 3}, instruction="buy something soft")


@contextmanager
def opened(**settings: object) -> Iterator[EnvironmentRuntime]:
    config = OpenHandsConfig(enable_browser=False, extended=ExtendedConfig({"rl": settings}))
    stream = EventStream("session", InMemoryFileStore())
    runtime = EnvironmentRuntime(config=config, event_stream=stream, llm_registry=LLMRegistry(config))
    yield runtime
    runtime.close()
    stream.close()


@pytest.fixture
def runtime() -> Iterator[EnvironmentRuntime]:
    with running_shop() as url, opened(env_server_base=url) as runtime:
        yield runtime


def send(runtime: EnvironmentRuntime, name: str, arguments: JsonObject) -> Observation:
    observation = asyncio.run(runtime.call_tool_mcp(MCPAction(name=name, arguments=arguments)))
    assert isinstance(observation, MCPObservation) and observation.name == name
    answer, runtime.answer = runtime.answer, None
    assert answer is not None and Observation.model_validate_json(observation.content) == answer
    return answer


def reset(runtime: EnvironmentRuntime) -> Observation:
    return send(runtime, RESET_TOOL, TASK.model_dump(mode="json"))


def act(runtime: EnvironmentRuntime, action: str) -> Observation:
    return send(runtime, STEP_TOOL, {"content": f"Thought: go on\nAction: {action}"})


def test_an_episode_to_its_end(runtime: EnvironmentRuntime) -> None:
    opening = reset(runtime)
    assert [message.role for message in opening.messages] == ["system", "user"]
    assert "Task: buy something soft" in (opening.messages[0].content or "")
    malformed = send(runtime, STEP_TOOL, {"content": "no action here"})
    assert malformed.reward == 0.0 and malformed.messages
    page = act(runtime, "search[shoes]").messages[0].content or ""
    act(runtime, f"click[{next(part for part in page.splitlines() if part.startswith('B0'))}]")
    end = act(runtime, "click[Buy Now]")
    assert end.terminated and 0.0 <= end.reward <= 1.0
    evidence, failure = runtime.conclude()
    assert failure is None and evidence is not None and evidence["done"] is True


def test_the_evidence_of_an_unfinished_episode_is_gathered_at_the_end(runtime: EnvironmentRuntime) -> None:
    reset(runtime)
    act(runtime, "search[shoes]")
    evidence, failure = runtime.conclude()
    assert failure is None and evidence is not None and evidence["done"] is False and evidence["steps"] == 1


def test_other_actions_are_refused_clearly(runtime: EnvironmentRuntime) -> None:
    for action in (CmdRunAction("ls"), FileReadAction("/etc/passwd")):
        observation = runtime.run_action(action)
        assert isinstance(observation, ErrorObservation) and type(action).__name__ in observation.content


def test_a_server_that_dies_in_mid_episode() -> None:
    with running_shop() as url:
        opening = opened(env_server_base=url)
        runtime = opening.__enter__()
        reset(runtime)
        act(runtime, "search[shoes]")
    action = MCPAction(name=STEP_TOOL, arguments={"content": "Thought: go on\nAction: search[boots]"})
    assert isinstance(asyncio.run(runtime.call_tool_mcp(action)), ErrorObservation) and runtime.answer is None
    evidence, failure = runtime.conclude()
    assert failure is not None and failure.kind is FailureKind.INFRASTRUCTURE and failure.boundary == "environment.step"
    assert evidence is not None and evidence["steps"] == 1, "what it has of itself is kept"


def test_a_task_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TASK_INDEX_VARIABLE, "twelve")
    with pytest.raises(ConfigError, match="whole number"):
        task_from_environment_variable(RLSettings())
