"""An environment behind OpenHands' runtime interface, over real HTTP servers and in process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from openhands.core.config import OpenHandsConfig
from openhands.core.config.extended_config import ExtendedConfig
from openhands.events.action import CmdRunAction, FileReadAction
from openhands.events.observation import ErrorObservation
from openhands.events.stream import EventStream
from openhands.llm.llm_registry import LLMRegistry
from openhands.storage.memory import InMemoryFileStore
from small_shop import running_shop

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError
from openhands_rl_plugin.core.types import FailureKind, Message, Observation, Task
from openhands_rl_plugin.hosts.shared.sessions import TASK_INDEX_VARIABLE, task_from_environment_variable
from openhands_rl_plugin.hosts.v0.runtime import EnvironmentRuntime

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


def act(runtime: EnvironmentRuntime, action: str) -> Observation:
    message = Message(role="assistant", content=f"Thought: go on\nAction: {action}")
    return background().wait_for(runtime.live.step(message))


def test_the_evidence_of_an_unfinished_episode_is_gathered_at_the_end(runtime: EnvironmentRuntime) -> None:
    opening = background().wait_for(runtime.live.reset(TASK))
    assert "Task: buy something soft" in (opening.messages[0].content or "")
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
        background().wait_for(runtime.live.reset(TASK))
        act(runtime, "search[shoes]")
    with pytest.raises(CaughtFailure):
        act(runtime, "search[boots]")
    evidence, failure = runtime.conclude()
    assert failure is not None and failure.kind is FailureKind.INFRASTRUCTURE and failure.boundary == "environment.step"
    assert evidence is not None and evidence["steps"] == 1, "what it has of itself is kept"


def test_a_task_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TASK_INDEX_VARIABLE, "twelve")
    with pytest.raises(ConfigError, match="whole number"):
        task_from_environment_variable(RLSettings())
