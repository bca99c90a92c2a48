"""Whoever is judged does not decide whether he is judged: what sessions do to the patch and to the reward's command."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.config.rl import WorkspaceSettings
from openhands_rl_plugin.core.files import remove_tree
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.environments.workspace import patch
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace
from openhands_rl_plugin.rewards.command import CommandOptions, CommandReward
from openhands_rl_plugin.testing import example_trajectory

pytestmark = needs_bubblewrap

WAYS: dict[str, list[dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("judged.toml").read_text(encoding="utf-8")
)
COMMIT = "git -c user.name=a -c user.email=a@b commit -q"
PROTECTED = ("*", "!src", "!src/*")
TESTS = "from src.calc import add\nassert add(1, 2) == 3, 'wrong'\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, text in {
        "src/calc.py": "def add(a, b):\n    return a - b\n",
        "tests/check.py": TESTS,
        "run.sh": "PYTHONPATH=. python3 tests/check.py && echo 1.0\n",
        "kept.log": "kept\n",
        ".gitignore": "*.log\n__pycache__\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(f"git init -q && git add -A -f && {COMMIT} -m start", shell=True, cwd=root, check=True)
    return root


@pytest.fixture
def root(repository: Path, tmp_path: Path) -> Path:
    return shutil.copytree(repository, tmp_path / "work")


def opened(root: Path) -> SandboxedWorkspace:
    return SandboxedWorkspace(root, WorkspaceSettings(), protected=PROTECTED)


@pytest.fixture
def session(root: Path) -> Iterator[SandboxedWorkspace]:
    workspace = opened(root)
    yield workspace
    workspace.close()
    remove_tree(root)  # pytest cannot remove each of them


def evidence(session: SandboxedWorkspace, way: str) -> JsonObject:
    ran = session.run(f"sed -i s/-/+/ src/calc.py; {way}", timeout=60)
    assert ran.exit_code == 0, ran.output
    found, failure = session.conclude()
    assert found is not None and failure is None
    return found


@pytest.mark.parametrize("tried", WAYS["patch"], ids=lambda tried: tried["name"])
def test_the_patch_is_taken_whatever_lies_in_the_workspace(session: SandboxedWorkspace, tried: dict[str, Any]) -> None:
    found, changed = evidence(session, tried["way"]), tried["changed"]
    assert found["changed_files"] == {"src/calc.py": "modified", **changed}, found
    assert "-    return a - b\n+    return a + b\n" in str(found["git_patch"])
    if "lib/new.py" in changed:
        assert "+++ b/lib/new.py" in str(found["git_patch"])


@pytest.mark.parametrize("tried", WAYS["refused"], ids=lambda tried: tried["name"])
def test_what_cannot_be_compared_is_the_session_s_doing(
    session: SandboxedWorkspace, tried: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch, "MAX_START_BYTES", 10 * 2**20)
    found = evidence(session, tried["way"])
    assert found["git_patch"] is None and tried["why"] in found.get("git_patch_refused", ""), found


def test_no_session_inherits_an_index(root: Path) -> None:
    first = opened(root)
    first.run("git update-index --skip-worktree src/calc.py; git update-index --assume-unchanged run.sh", timeout=20)
    first.run(
        "cp --preserve=all src/calc.py c; sed -i 's/a - b/a % b/' src/calc.py; touch -r c src/calc.py", timeout=20
    )
    first.close()
    second = opened(root)
    found = evidence(second, "sed -i 's/%/+/' src/calc.py; rm c")
    second.close()
    assert found["changed_files"] == {"src/calc.py": "modified", "c": "deleted"}
    assert "-    return a % b\n+    return a + b\n" in str(found["git_patch"])


def test_changes_of_tracked_files_that_git_would_ignore_are_in_the_patch(session: SandboxedWorkspace) -> None:
    assert evidence(session, "echo more >> kept.log; echo x > new.log")["changed_files"] == {
        "src/calc.py": "modified",
        "kept.log": "modified",
    }


def test_processes_of_the_session_go_on_after_its_patch_was_taken(session: SandboxedWorkspace) -> None:
    evidence(session, "(while :; do date >> now; done) & sleep 0.1")
    assert session.run("one=$(wc -c < now); sleep 0.3; [ $(wc -c < now) -gt $one ]", timeout=20).exit_code == 0


async def scored(session: SandboxedWorkspace, **more: object) -> list[float]:
    """The rewards of one run of the command: by its exit status, and by its last line."""
    asked = {"command": "sh run.sh", "timeout": 20, "protected": PROTECTED, **more}
    options = [CommandOptions.model_validate({**asked, "result": result}) for result in ("exit-status", "last-line")]
    checked = {"command": session.check(options[0]).model_dump(mode="json")}
    judged = example_trajectory().model_copy(update={"evidence": checked})
    return [(await CommandReward(each)(judged)).reward for each in options]


@pytest.mark.parametrize("tried", WAYS["command"], ids=lambda tried: tried["name"])
async def test_the_command_is_not_hacked(session: SandboxedWorkspace, tried: dict[str, Any]) -> None:
    session.run(tried["way"], timeout=60)
    assert await scored(session, timeout=tried.get("timeout", 3)) == [0.0, 0.0]


async def test_honest_work_passes_and_stays_as_it_is(session: SandboxedWorkspace, root: Path) -> None:
    way = (
        "sed -i s/-/+/ src/calc.py; echo own > tests/own.py; echo > run.sh; git init -q src/lib; chmod 400 src/calc.py"
    )
    session.run(way, timeout=60)
    for _ in range(2):
        assert await scored(session) == [1.0, 1.0]
    assert (root / "tests/own.py").read_text() == "own\n" and (root / "run.sh").read_text() == "\n"


async def test_protected_files_that_git_ignores_are_put_back(session: SandboxedWorkspace, root: Path) -> None:
    session.run("sed -i s/-/+/ src/calc.py; echo gone > kept.log", timeout=60)
    for protected, reward in ((("kept.log",), 1.0), ((), 0.0)):
        assert (await scored(session, command="grep -q kept kept.log", protected=protected))[0] == reward
