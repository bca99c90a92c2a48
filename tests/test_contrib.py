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
MODEL = "--model model --base-url http://127.0.0.1:9/v1 --dry-run"

QUICK = ("environments/http/test_fork.py", "rollout/test_episode.py")
"""An environment's server and a recorded session; the slow test runs all of them."""


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
    return subprocess.run(command, cwd=environment["PYTHONPATH"], env=environment, capture_output=True, text=True)


def test_no_folder_imports_another() -> None:
    for file in (PACKAGE / "contrib").rglob("*.py"):
        own = file.relative_to(PACKAGE / "contrib").parts[0]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("openhands_rl_plugin.contrib."):
                other = (node.module or "").split(".")[2]
                assert own == other or (own, other) in BESIDE, f"{file}:{node.lineno}"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        *((f"{name} --help", f"command '{name}'") for name in ("studio", "demo", "watch")),
        (f"evaluate repair-1 {MODEL}", "suite 'repair-1'"),
        ("import one.traj --format swe-agent --into store", "format 'swe-agent'"),
        ("doctor --show --config watch.toml", "section 'watch'"),
    ],
)
def test_what_is_not_there_is_one_line(without: dict[str, str], words: str, what: str) -> None:
    Path(without["PYTHONPATH"], "one.traj").write_text("{}")
    Path(without["PYTHONPATH"], "watch.toml").write_text("[rl.watch]\ntasks = 3\n")
    ran = openhands_rl(without, *words.split())
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert f"{what} cannot be loaded from openhands_rl_plugin.contrib." in ran.stderr


@pytest.mark.parametrize(
    ("words", "shown"),
    [("--help", "not installed"), (f"evaluate swe-local {MODEL}", ""), ("doctor --init", "wrote config.toml")],
)
def test_the_rest_works(without: dict[str, str], words: str, shown: str) -> None:
    ran = openhands_rl(without, *words.split())
    assert ran.returncode == 0 and shown in ran.stdout, ran.stderr


def run_contract(environment: dict[str, str], *words: str, seconds: float) -> None:
    """Run the contract tests of the copy, where each passes or is skipped. Their programs import from their folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    where = {"cwd": environment["PYTHONPATH"], "env": {**environment, "PYTHONSAFEPATH": ""}}
    command += ["--basetemp", f"{environment['PYTHONPATH']}/made"]
    ran = subprocess.run(command, **where, capture_output=True, text=True, timeout=seconds, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]


def test_quick_contract_tests_of_the_rest_pass(without: dict[str, str]) -> None:
    run_contract(without, "-m", "contract and not gpu", *(f"tests/{each}" for each in QUICK), seconds=280)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_contract_tests_of_the_rest_pass(without: dict[str, str]) -> None:
    run_contract(without, "tests", "-m", "contract and not slow and not gpu", seconds=3600)
