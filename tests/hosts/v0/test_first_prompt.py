"""What is checked of the model server before a run, and which adapter the run samples from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from openhands.core.config import LLMConfig
from openhands.core.logger import openhands_logger
from pydantic import SecretStr
from scripted_model import ScriptedModel, serve

from openhands_rl_plugin import AdapterStore
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.hosts.v0.first_prompt import FirstPrompt

PROMPT = [{"role": "user", "content": "x" * 100}]  # 103 tokens


@pytest.fixture
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        model.script("base", [])
        model.context = 200
        yield model


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    openhands_logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, openhands_logger.name)
    yield caplog
    openhands_logger.removeHandler(caplog.handler)


def checked(server: ScriptedModel, tmp_path: Path, model: str = "openai/base", **rl: object) -> FirstPrompt:
    serving = {"base_url": server.url, "adapters_path": str(tmp_path / "adapters")}
    settings = RLSettings.model_validate({"serving": serving, **rl})
    first = FirstPrompt(LLMConfig(model=model, base_url=server.url, api_key=SecretStr("none")), settings)
    first.check_server()
    return first


def published(tmp_path: Path) -> Adapter:
    store = AdapterStore(tmp_path / "adapters")
    adapter = store.create("policy", lambda folder: (folder / "adapter_model.safetensors").touch(), base_model="base")
    store.point(adapter)
    return adapter


def test_prompt_and_answer_must_fit_into_the_context(server: ScriptedModel, tmp_path: Path) -> None:
    checked(server, tmp_path, max_response_length=97).check_length(PROMPT, ())
    with pytest.raises(ConfigError, match=r"has 103 tokens and .* leaves 98 for the answer: more than the 200 of"):
        checked(server, tmp_path, max_response_length=98).check_length(PROMPT, ())
    server.context = None
    checked(server, tmp_path, max_response_length=98).check_length(PROMPT, ())


def test_tools_count(server: ScriptedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="first prompt has 1"):
        checked(server, tmp_path, max_response_length=97).check_length(PROMPT, ({"type": "function"},))


def test_a_server_that_is_away_is_one_line_with_a_remedy() -> None:
    config = LLMConfig(model="openai/base", base_url="http://127.0.0.1:9/v1", api_key=SecretStr("none"))
    with pytest.raises(InfrastructureError, match=r"no model server answers at .*: start it with `openhands-rl serve`"):
        FirstPrompt(config, RLSettings()).check_server()


def test_without_a_model_section_the_remedy_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"\[llm\] names no server, and .* needs a key \(ANTHROPIC_API_KEY\): start"):
        FirstPrompt(LLMConfig(model="anthropic/claude-sonnet-4-20250514"), RLSettings()).check_server()
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    FirstPrompt(LLMConfig(model="anthropic/claude-sonnet-4-20250514"), RLSettings()).check_server()


def test_a_name_that_is_not_listed_is_a_warning(
    server: ScriptedModel, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    checked(server, tmp_path, model="openai/bsae")
    assert "lists no model 'bsae'; set [llm] model to \"openai/\" and one of: base" in warnings.text


def test_the_published_adapter_is_sampled_from_when_the_server_has_it(
    server: ScriptedModel, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    assert checked(server, tmp_path).adapter_in_use() is None
    adapter = published(tmp_path)
    assert checked(server, tmp_path).adapter_in_use() is None
    assert f"--adapters {tmp_path}/adapters --adapter policy --version 1 --base-url {server.url}" in warnings.text
    server.adapters = {adapter.name: "another"}
    assert checked(server, tmp_path).adapter_in_use() is None
    server.adapters = {adapter.name: "base"}
    assert checked(server, tmp_path).adapter_in_use() == adapter.name
