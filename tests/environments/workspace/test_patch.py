"""The patch of what a session changed, from real workspaces, with and without a repository in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.environments.workspace import patch as changes
from openhands_rl_plugin.environments.workspace.patch import Baseline
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox

pytestmark = needs_bubblewrap
Changed = Callable[[Callable[[Path], object]], JsonObject]


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def sandbox(tmp_path: Path) -> BubblewrapSandbox:
    root = tmp_path / "work"
    root.mkdir()
    return BubblewrapSandbox(root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture
def changed(sandbox: BubblewrapSandbox, root: Path, tmp_path: Path) -> Changed:
    def changed(work: Callable[[Path], object]) -> JsonObject:
        baseline = Baseline(tmp_path)
        baseline.remember(sandbox)
        work(root)
        return baseline.changes(sandbox)

    return changed


def test_a_change_in_the_second_of_the_start_is_seen(sandbox: BubblewrapSandbox, root: Path, tmp_path: Path):
    """Git compares whole seconds, and sizes; a file that looks the same is read again if the index is as young."""
    path = root / "old.py"
    path.write_text("a = 1\n")
    git(root, "init", "-q")
    second = int(time.time()) - 100
    os.utime(path, (second, second))
    git(root, "add", "-A")
    git(root, "commit", "-qm", "start")
    os.utime(root / ".git" / "index", (second, second))
    baseline = Baseline(tmp_path)
    baseline.remember(sandbox)
    os.utime(tmp_path / "start.git" / "index", (second, second))
    path.write_text("a = 2\n")
    os.utime(path, (second, second))
    assert baseline.changes(sandbox)["changed_files"] == {"old.py": "modified"}


@pytest.mark.parametrize("repository", ["none", "clean", "dirty"])
def test_the_patch_leads_from_the_start_to_the_end(changed: Changed, root: Path, tmp_path: Path, repository: str):
    (root / "kept.txt").write_text("kept\n")
    (root / "old.py").write_text("a = 1\nb = 2\n")
    (root / "gone.txt").write_text("gone\n")
    if repository != "none":
        git(root, "init", "-q")
        git(root, "add", "-A")
        git(root, "commit", "-qm", "start")
    if repository == "dirty":
        (root / "old.py").write_text("a = 1\nb = 20\n")
        (root / "loose.txt").write_text("never added\n")
    shutil.copytree(root, tmp_path / "start", ignore=shutil.ignore_patterns(".git"))

    def work(root: Path) -> None:
        (root / "old.py").write_text("a = 1\nb = 3\n")
        (root / "gone.txt").unlink()
        (root / "new é.txt").write_text("new\n")
        (root / "sub").mkdir()
        (root / "sub" / "deep.txt").write_text("deep")
        (root / "sub" / "binary").write_bytes(b"\0\1\2")
        if repository != "none":
            git(root, "add", "-A")
            git(root, "commit", "-qm", "the session commits too")

    evidence = changed(work)
    kinds = {"old.py": "modified", "gone.txt": "deleted", "new é.txt": "added", "sub/deep.txt": "added"}
    assert evidence["changed_files"] == {**kinds, "sub/binary": "added"}
    patch = evidence["git_patch"]
    assert isinstance(patch, str) and "Binary" not in patch
    subprocess.run(["git", "apply"], input=patch.encode(), cwd=tmp_path / "start", check=True)
    assert texts(tmp_path / "start") == texts(root)


def texts(folder: Path) -> dict[str, str]:
    """All files but those of a repository and binary ones."""
    files = (path for path in folder.rglob("*.*") if ".git" not in path.parts and path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_large_changes_are_cut_and_marked(changed: Changed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(changes, "MAX_PATCH_BYTES", 1000)
    monkeypatch.setattr(changes, "MAX_NAMES_BYTES", 50)
    evidence = changed(lambda root: [(root / f"file{n}").write_text("é" * 300 + "\n") for n in range(9)])
    assert evidence["git_patch_cut"] is evidence["changed_files_cut"] is True
    assert len(str(evidence["git_patch"]).encode()) in (999, 1000)
    assert evidence["changed_files"] == {f"file{n}": "added" for n in range(6)}


def test_a_large_start_is_not_recorded_unless_git_knows_it(
    changed: Changed, root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(changes, "MAX_START_BYTES", 2**17)
    for number in range(4):
        (root / f"f{number}").write_text("a\n" * 2**15)
    evidence = changed(lambda root: None)
    assert evidence["git_patch"] is None and "is no git repository" in str(evidence["git_patch_missing"])
    git(root, "init", "-q")
    git(root, "add", "-A")
    assert changed(lambda root: (root / "f0").unlink())["changed_files"] == {"f0": "deleted"}
