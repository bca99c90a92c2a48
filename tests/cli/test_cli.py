from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openhands_rl_plugin import cli


def command_that(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int], **extra: Any) -> None:
    """Make ``openhands-rl try`` do ``run``."""
    module = SimpleNamespace(add_arguments=lambda parser: None, run=run, **extra)
    monkeypatch.setattr(cli, "module_of", lambda name: module)


def test_help_lists_the_commands_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in cli.commands())
    assert "examples:" in printed


@pytest.mark.parametrize("command", list(cli.commands()))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["lst"], ["score"], ["tasks", "chekc"], ["list", "store", "--dsc"]])
def test_wrong_usage_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_list_of_commands_imports_none_of_them() -> None:
    program = "import sys; from openhands_rl_plugin import cli; cli.main(['--help']); print(sorted(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "openhands_rl_plugin.cli'" in printed
    assert not [command for command in cli.COMMANDS if f"'openhands_rl_plugin.cli.{command}'" in printed]


def test_an_error_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--show", "--config", str(tmp_path / "none.toml")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    remedy = "write one with: openhands-rl doctor --init"
    assert captured.err == f"error: {tmp_path}/none.toml: there is no such file; {remedy}\n"


def test_an_unforeseen_error_is_one_line_unless_the_place_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError("oh\nno")

    command_that(monkeypatch, run)
    monkeypatch.delenv(cli.DEBUG, raising=False)
    assert cli.main(["try"]) == 1
    assert capsys.readouterr().err == "error: ZeroDivisionError: oh (set OPENHANDS_RL_DEBUG=1 to see where)\n"
    monkeypatch.setenv(cli.DEBUG, "1")
    assert cli.main(["try"]) == 1
    assert "Traceback" in capsys.readouterr().err
