"""What a run of an evaluation needs is asked for before it, and one that says nothing fails."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from scripted_model import refusal, serve

from openhands_rl_plugin.cli import main

WORDS = ["evaluate", "webshop", "--agent", "RLAgent", "--limit", "2", "--processes", "0"]


@pytest.fixture
def closed() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def one_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_model_server_that_is_away(closed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line(capsys, [*WORDS, "--model", "m", "--base-url", f"{closed}/v1", "--out", str(tmp_path)])
    assert "no model server answers at" in line and "start it" in line


def test_an_environment_that_is_away(closed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[rl]\nenv_name = "openenv/echo"\nenv_server_base = "{closed}"\n')
    with serve() as model:
        words = ["evaluate", "environment", "--tasks", "1", "--agent", "RLAgent", "--config", str(config)]
        where = ["--model", "m", "--base-url", model.url, "--out", str(tmp_path)]
        line = one_line(capsys, [*words, *where])
    assert f"no server of the environment openenv/echo answers at {closed}" in line and "[rl]" in line


def test_a_run_without_a_verdict_fails_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as model:
        model.script("m", [refusal(400, "this model is out of order")] * 50)
        words = [*WORDS, "--model", "m", "--base-url", model.url, "--out", str(tmp_path)]
        assert main(words) == 1
    printed = capsys.readouterr().err
    assert "2 of 2 attempts say nothing about the agent: " in printed and "this model is out of order" in printed
