"""What is checked of the model server before a run, and which adapter the run samples from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

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


def test_a_server_that_is_away_is_one_line_with_a_remedy() -> None:
    config = LLMConfig(model="openai/base", base_url="http://127.0.0.1:9/v1", api_key=SecretStr("none"))
    with pytest.raises(InfrastructureError, match=r"no model server answers at .*: start it with `openhands-rl serve`"):
        FirstPrompt(config, RLSettings()).check_server()


class _Lists(BaseHTTPRequestHandler):
    """``/models`` with the status and the body that the path names."""

    answers: ClassVar[dict[str, tuple[int, str]]] = {
        "bare": (200, '[{"id": "m"}]'),
        "null": (200, '{"data": [{"id": "m", "owned_by": null}]}'),
        "html": (200, "<html>"),
        **{str(status): (status, "{}") for status in (400, 403, 404, 429, 500)},
    }

    def do_GET(self) -> None:
        name = self.path.split("/")[1]
        known = self.headers.get("authorization") == "Bearer sk-right"
        status, body = self.answers["bare"] if name == "key" and known else self.answers.get(name, (401, "{}"))
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def lists() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Lists) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["bare", "null", "key", "html", "400", "403", "404", "429", "500"])
def test_a_server_that_lists_nothing_may_still_complete(
    lists: str, name: str, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
    FirstPrompt(LLMConfig(model="openai/m", base_url=f"{lists}/{name}"), RLSettings()).check_server()
    assert ("cannot be read" in warnings.text) is (name not in ("bare", "null", "key"))


def test_a_key_that_is_refused_ends_the_run_and_no_key_does_not(lists: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LLMConfig(model="openai/m", base_url=f"{lists}/key")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    FirstPrompt(config, RLSettings()).check_server()
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    with pytest.raises(ConfigError, match="refuses the API key"):
        FirstPrompt(config, RLSettings()).check_server()


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
