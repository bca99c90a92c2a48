"""What a new user gets wrong first is one line, with cause and remedy, before anything slow begins."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openhands_rl_plugin import cli


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def the_line(capsys: pytest.CaptureFixture[str], words: list[str], code: int = 1) -> str:
    started = time.monotonic()
    assert cli.main(words) == code
    assert time.monotonic() - started < 8
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == "" and line.startswith("error: ") and "Traceback" not in line
    return line


def test_a_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # no folder, and one without a model
        assert cli.main(["serve", "--port", "0", "--model", "./nomodel"]) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: cannot load the model ./nomodel: ") and "a directory with config.json" in line
        assert "this is not the folder of a model" in the_line(capsys, ["demo", "--fresh", "--model", "./nomodel"])
        (tmp_path / "nomodel").mkdir(exist_ok=True)


def test_a_chat_with_a_server_that_is_away(
    closed_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    line = the_line(capsys, ["chat", "--model", "m", "--base-url", f"http://127.0.0.1:{closed_port}/v1"])
    assert "no model server answers" in line and "start it" in line


_INTERRUPTED_AT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from openhands_rl_plugin.__main__ import main
sys.argv[1:] = ["list", "x"]
main()
"""


@pytest.mark.parametrize("module", ["openhands_rl_plugin.cli", "openhands_rl_plugin.core.errors", "pydantic"])
def test_ctrl_c_while_the_program_starts(module: str) -> None:
    command = [sys.executable, "-c", _INTERRUPTED_AT.replace("sys.argv[1]", repr(module), 1)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")
