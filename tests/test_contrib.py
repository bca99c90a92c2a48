"""What lies in ``contrib`` is reached by entry points: the rest works without it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "openhands_rl_plugin"
BESIDE = {("demo", "webshop"), ("demo", "repair")}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the package without ``contrib``."""
    folder = tmp_path_factory.mktemp("without")
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("contrib", "__pycache__"))
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def openhands_rl(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "openhands_rl_plugin", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_no_folder_imports_another() -> None:
    for file in (PACKAGE / "contrib").rglob("*.py"):
        own = file.relative_to(PACKAGE / "contrib").parts[0]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("openhands_rl_plugin.contrib."):
                other = (node.module or "").split(".")[2]
                assert own == other or (own, other) in BESIDE, f"{file}:{node.lineno}"


@pytest.mark.parametrize("command", ["studio", "demo", "watch"])
def test_a_command_that_is_not_there_is_one_line(without: dict[str, str], command: str) -> None:
    ran = openhands_rl(without, command, "--help")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith(f"error: command '{command}' cannot be loaded from openhands_rl_plugin.contrib.")
    assert ran.stderr.count("\n") == 1


def test_a_suite_that_is_not_there_is_one_line(without: dict[str, str]) -> None:
    model = ["--model", "model", "--base-url", "http://127.0.0.1:9/v1"]
    ran = openhands_rl(without, "evaluate", "repair-1", *model, "--dry-run")
    assert ran.returncode == 1
    assert "suite 'repair-1' cannot be loaded from openhands_rl_plugin.contrib." in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_format_that_is_not_there_is_one_line(without: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "one.traj").write_text("{}")
    ran = openhands_rl(without, "import", str(tmp_path), "--format", "swe-agent", "--into", str(tmp_path / "store"))
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: format 'swe-agent' cannot be loaded from openhands_rl_plugin.contrib.")
    assert ran.stderr.count("\n") == 1


def test_a_section_that_is_not_there_is_one_line(without: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[rl.watch]\ntasks = 3\n")
    ran = openhands_rl(without, "config", "check", str(file))
    assert ran.returncode == 1
    assert "section 'watch' cannot be loaded from openhands_rl_plugin.contrib." in ran.stderr


def test_the_rest_works(without: dict[str, str]) -> None:
    listed = openhands_rl(without, "--help")
    assert listed.returncode == 0 and "not installed" in listed.stdout
    shown = openhands_rl(
        without, "evaluate", "swe-local", "--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--dry-run"
    )
    assert shown.returncode == 0, shown.stderr
