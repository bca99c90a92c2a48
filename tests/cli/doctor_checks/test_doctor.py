"""Checks of an installation, against real servers, folders and processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tiny_model import write_model

from openhands_rl_plugin import cli
from openhands_rl_plugin.cli.doctor import (
    Finding,
    check_adapters,
    check_all,
    check_installation,
    check_model_server,
)
from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE, AdapterStore
from openhands_rl_plugin.models.generator.config import GeneratorConfig, ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


def of(findings: list[Finding], what: str) -> Finding:
    return next(each for each in findings if each.what.startswith(what))


@pytest.fixture(scope="module")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The embedded server with a tiny model, called ``tiny``."""
    model = write_model(tmp_path_factory.mktemp("models") / "tiny")
    config = GeneratorConfig(model=str(model), dtype="float32", threads=1, max_batch=1)
    with (
        Generator(config) as generator,
        running_server(ServerConfig(model=str(model), served_model_name="tiny", port=0), generator) as url,
    ):
        yield f"{url}/v1"


@pytest.fixture
def other_server() -> Iterator[str]:
    """A server that answers without token ids, and wants a key for nothing but ``/locked``."""

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "one"}, {"id": "two"}]})

    async def chat(request: Request) -> JSONResponse:
        choice = {"index": 0, "message": {"role": "assistant", "content": "Yes"}, "logprobs": None}
        return JSONResponse({"choices": [choice]})

    async def locked(request: Request) -> JSONResponse:
        return JSONResponse({"error": "no key"}, status_code=401)

    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/locked/models", locked),
        ]
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


async def server_findings(url: str, model: str = "", *, probe: bool = True) -> list[Finding]:
    return await check_model_server(ServingSettings(base_url=url, model=model), probe=probe)


async def test_a_server_of_the_model_is_found_and_probed(model_server: str) -> None:
    listed, probed = await server_findings(model_server, "tiny")
    assert [listed.level, probed.level] == ["ok", "ok"]
    assert "tiny" in listed.found and "logprobs" in probed.found


async def test_a_server_without_token_ids_fails_the_probe(other_server: str) -> None:
    listed, probed = await server_findings(f"{other_server}/v1")
    assert listed.found == "serves one, two"
    assert (probed.level, probed.found) == ("fail", "a completion has none")


@pytest.mark.parametrize(
    ("path", "model", "found"),
    [
        ("/v1", "three", "serves one, two, not three"),
        ("/locked", "", "refuses the API key"),
        ("/nothing", "", "has no list of models"),
    ],
)
async def test_a_wrong_server_fails(other_server: str, path: str, model: str, found: str) -> None:
    (finding,) = await server_findings(f"{other_server}{path}", model)
    assert finding.level == "fail" and found in finding.found
    assert finding.remedy


async def test_a_server_of_this_machine_may_start_later() -> None:
    for url, probe, level in (
        ("http://127.0.0.1:9/v1", False, "warn"),
        ("http://127.0.0.1:9/v1", True, "fail"),
        ("http://model.invalid/v1", False, "fail"),
    ):
        (finding,) = await server_findings(url, probe=probe)
        assert finding.level == level and "openhands-rl serve" in finding.remedy


def test_the_file_that_init_writes_is_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["doctor", "--init"]) == 0
    found = asyncio.run(check_all(Path("config.toml"), registration=False))
    assert not [each for each in found if each.level == "fail"]


def published(root: Path) -> AdapterStore:
    store = AdapterStore(root)

    def write(folder: Path) -> None:
        (folder / WEIGHTS_FILE).write_bytes(b"weights")

    store.point(store.create("policy", write, base_model="m"))
    return store


def test_an_adapter_is_followed_from_the_pointer_to_the_weights(tmp_path: Path) -> None:
    assert check_adapters(tmp_path / "none", "policy").level == "ok"
    published(tmp_path)
    assert check_adapters(tmp_path, "policy").found == "policy-v000001 is in use and undamaged"
    (tmp_path / "policy-v000001" / WEIGHTS_FILE).write_bytes(b"other")
    assert check_adapters(tmp_path, "policy").level == "fail"


async def test_the_store_is_counted(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        await storage.add(example_trajectory(0))
    config = tmp_path / "config.toml"
    config.write_text(f'[rl.storage]\npath = "{tmp_path}/store"\n[rl.serving]\nadapters_path = "{tmp_path}/adapters"\n')
    findings = await check_all(config, registration=False)
    assert of(findings, "stored episodes").found.startswith("1 and 0 unfinished")


async def test_a_wrong_configuration_is_told_line_by_line(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[rl]\nmax_turn = 3\nenv_port = 0\n")
    told = [each for each in await check_all(config, registration=False) if each.what == "configuration"]
    assert len(told) == 2 and all(each.level == "fail" for each in told)


def test_what_is_installed_is_named() -> None:
    findings = list(check_installation(registration=False))
    assert {each.what for each in findings} >= {"package", "host", "bubblewrap"}


@pytest.mark.usefixtures("no_bubblewrap")
def test_without_bubblewrap_there_is_a_warning() -> None:
    found = of(list(check_installation(registration=False)), "bubblewrap")
    assert found.level == "warn" and found.found.startswith("bubblewrap is not installed")


@pytest.mark.slow
def test_the_agent_is_registered_with_openhands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openhands.py").write_text("raise SystemExit(1)")  # of whoever works in this folder
    monkeypatch.chdir(tmp_path)
    assert of(list(check_installation()), "registration").level == "ok"


def test_the_command_fails_when_a_check_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    away = f'[rl.storage]\npath = "{tmp_path}/store"\n[rl.serving]\nbase_url = "http://model.invalid/v1"\n'
    config.write_text(f'{away}adapters_path = "{tmp_path}/adapters"\n')
    assert cli.main(["doctor", "--quick", "--config", str(config)]) == 1
    printed = capsys.readouterr().out
    assert "\nfail model server" in printed and "\nok   storage" in printed


async def test_a_database_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_DATABASE", "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=50")
    config = tmp_path / "config.toml"
    config.write_text('[rl]\nstorage_backend = "mongodb"\n[rl.storage]\nuri_env = "A_DATABASE"\n')
    found = of(await check_all(config, registration=False), "stored episodes")
    assert found.level == "fail" and "127.0.0.1:1 cannot be reached" in found.found
