"""What a run of an evaluation needs is asked for before it, and one that says nothing fails."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from git_backend import make_instances
from scripted_model import refusal, serve

from openhands_rl_plugin.cli import main
from openhands_rl_plugin.core.errors import ConfigError, MissingExtraError
from openhands_rl_plugin.evals.swe.recipes import swe_bench
from openhands_rl_plugin.evals.swe.run_evaluation import check_gradable

WORDS = ["evaluate", "webshop", "--agent", "RLAgent", "--limit", "2", "--api-key-env", "", "--processes", "0"]


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
        where = ["--model", "m", "--base-url", model.url, "--api-key-env", "", "--out", str(tmp_path)]
        line = one_line(capsys, [*words, *where])
    assert f"no server of the environment openenv/echo answers at {closed}" in line and "[rl]" in line


def test_a_run_that_says_nothing_fails_and_tells_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as model:
        model.script("m", [refusal(400, "this model is out of order")] * 50)
        words = [*WORDS, "--model", "m", "--base-url", model.url, "--out", str(tmp_path), "--retries", "0"]
        assert main(words) == 1
    said = capsys.readouterr().err
    assert "2 of 2 attempts say nothing about the agent: " in said and "this model is out of order" in said


def test_instances_that_cannot_be_graded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, other = make_instances(tmp_path, 2)
    runnable = good.model_copy(update={"extra": {**good.extra, "test_command": "pytest"}})
    old = other.model_copy(update={"extra": {**other.extra, "test_command": "pytest", "python": "2.2"}})
    assert check_gradable([runnable], containers=False) is None
    assert check_gradable([runnable, old], containers=True) is None, "images have their own interpreters"
    assert "1 of 2 instances cannot be graded here: Python 2.2 is not installed; get it with: uv python install" in str(
        check_gradable([runnable, old], containers=False)
    )
    with pytest.raises(ConfigError, match="1 of 1 instances cannot be graded here: Python 2"):
        check_gradable([old], containers=False)

    def absent(module: str) -> None:
        raise MissingExtraError("swebench", "swe")

    monkeypatch.setattr(swe_bench, "swebench", absent)
    foreign = good.model_copy(update={"repo": "django/django", "extra": {}})
    with pytest.raises(ConfigError, match=r"pip install 'openhands_rl_plugin\[swe\]'"):
        check_gradable([foreign], containers=False)
