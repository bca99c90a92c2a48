"""What lies in ``contrib`` is reached by entry points: the rest works without it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "openhands_rl_plugin"
BESIDE = {("demo", "webshop"), ("demo", "repair")}


QUICK = "test_tree or test_fork or test_session or test_what_a_task_is"
"""Values, an environment's server, a recorded session and tasks by name; the slow test runs all of them."""


@pytest.fixture(scope="module")
def without() -> Iterator[dict[str, str]]:
    """The environment of a process that has the package without ``contrib``, in a folder that no other run removes."""
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        copy_without(Path(folder))
        yield {**os.environ, "PYTHONPATH": folder, "PYTHONSAFEPATH": "1"}


def copy_without(folder: Path) -> None:
    """The package and its contract tests, both without ``contrib``."""
    for name in (PACKAGE.name, "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("contrib", "__pycache__"))
    for name in ("evaluation", "docs", "README.md", "config.toml.example", "Makefile", ".ci", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    texts = {file: file.read_text(encoding="utf-8") for file in (folder / "tests").rglob("test_*.py")}
    held = [text for text in texts.values() if "mark.contract" in text]
    lent = {name for text in held for name in re.findall(r"^from (test_\w+) import", text, re.MULTILINE)}
    for file, text in texts.items():
        whole = file.name in (Path(__file__).name, "test_wheel.py")  # of the package with all that it has
        if whole or (text not in held and file.stem not in lent):
            file.unlink()


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


def run_contract(environment: dict[str, str], *words: str, seconds: float) -> None:
    """Run the contract tests of the copy, where each passes or is skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", *words]
    where = {"cwd": environment["PYTHONPATH"], "env": environment}
    command += ["--basetemp", f"{environment['PYTHONPATH']}/made"]
    ran = subprocess.run(command, **where, capture_output=True, text=True, timeout=seconds, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]


def test_contract_tests_of_the_rest_are_collected_and_quick_ones_pass(without: dict[str, str]) -> None:
    run_contract(without, "-m", "contract and not gpu", "-k", QUICK, seconds=280)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_contract_tests_of_the_rest_pass(without: dict[str, str]) -> None:
    run_contract(without, "-m", "contract and not slow and not gpu", seconds=3600)
