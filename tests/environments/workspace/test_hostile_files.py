"""What a session leaves in its files never leads the host out of the workspace, blocks it or fills it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.config.rl import WorkspaceSettings
from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.environments.workspace.copies import copy_tree
from openhands_rl_plugin.environments.workspace.editor import WorkspaceEditor
from openhands_rl_plugin.environments.workspace.shell import MAX_FILE_BYTES
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace

# A folder of many files, and in its place, now and then, a link to another one with the same names.
SWAP = """
import os, sys
place, target = sys.argv[1:]
os.mkdir(f"{place}/d")
for at in range(1000):
    open(f"{place}/d/{at}", "w").close()
os.symlink(target, f"{place}/link")
print("swaps", flush=True)
while True:
    os.rename(f"{place}/d", f"{place}/e")
    os.rename(f"{place}/link", f"{place}/d")
    os.rename(f"{place}/d", f"{place}/link")
    os.rename(f"{place}/e", f"{place}/d")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "session" / "workspace"
    root.mkdir(parents=True)
    return root


@pytest.fixture
def editor(root: Path) -> Iterator[WorkspaceEditor]:
    workspace = SandboxedWorkspace(root, WorkspaceSettings(isolation="none"))
    yield WorkspaceEditor(lambda: workspace.files, root.parent / "private")
    workspace.close()


@pytest.fixture
def session(root: Path) -> Iterator[SandboxedWorkspace]:
    workspace = SandboxedWorkspace(root, WorkspaceSettings())
    yield workspace
    workspace.close()


@needs_bubblewrap
def test_a_link_leads_to_nothing_of_the_host(root: Path, session: SandboxedWorkspace):
    (root.parent / "secret").write_text("s3cret")
    (root / "file").write_text("text")
    links = {"here": "/workspace/file", "there": str(root.parent / "secret"), "loop": "loop", "host": "/root"}
    for name, target in links.items():
        (root / name).symlink_to(target)
    files = session.files
    assert files.read("here") == files.read("/workspace//./here") == files.read("file") == b"text"
    for name in ("there", "loop", "host/.bashrc", "../secret"):
        with pytest.raises(OSError):
            files.read(name)
    with pytest.raises(OSError):
        files.write("host/.bashrc", b"x")
    files.write("here", b"new")
    assert (root / "file").read_text() == "new" and (root / "here").is_symlink()
    assert (root.parent / "secret").read_text() == "s3cret"


@needs_bubblewrap
def test_files_are_of_a_kind_and_a_size(root: Path, session: SandboxedWorkspace):
    os.mkfifo(root / "pipe")
    (root / "large").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    for name, reason in (("pipe", "not a regular file"), ("/dev/zero", "not a regular file"), ("large", "10 MiB")):
        with pytest.raises(OSError, match=reason):
            session.files.read(name)
    for name in ("pipe", ".", "", "/usr/file"):
        with pytest.raises(OSError):
            session.files.write(name, b"x")
    session.files.write("new/deep/file", b"longer than before")
    (root / "new/deep/file").chmod(0o755)
    session.files.write("new/deep/file", b"short")
    written = root / "new/deep/file"
    assert written.read_bytes() == b"short" and written.stat().st_mode & 0o777 == 0o755
    (root / "link").symlink_to("/etc")
    kinds = [("large", "file"), ("link", "other"), ("new", "directory"), ("pipe", "other")]
    assert session.files.entries("/workspace") == kinds
    assert session.files.entries("new", levels=2) == [("deep", "directory"), ("deep/file", "file")]
    assert [session.files.kind(name) for name in ("nothing", "large/below", "link")] == [None, None, "directory"]


@needs_bubblewrap
def test_files_are_read_and_a_command_is_interrupted_while_it_runs(root: Path, session: SandboxedWorkspace):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(session.run, "echo on > file; sleep 60; echo not reached", timeout=60)
        while session.files.kind("file") is None:
            pass
        session.files.write("other", b"x" * 5_000_000)
        assert session.files.read("other") == b"x" * 5_000_000 and not running.done()
        session.interrupt()
        assert running.result(10).exit_code == 130


def test_a_way_back_from_behind_a_link_writes_nothing_elsewhere(root: Path, editor: WorkspaceEditor):
    """Behind the link, ``..`` leads to the workspace, but in a folder of copies without links far above it."""
    (root / "a/b/c/d/e").mkdir(parents=True)
    (root / "link").symlink_to("a/b/c/d/e")
    back = "../" * 5
    (root / "outside").mkdir()
    for command in ("create", "view"):
        with pytest.raises(PermissionError, match=r"without \.\."):
            editor.edit(command, f"{root}/link/{back}outside/planted", file_text="x")
    assert not list(root.parent.parent.rglob("planted"))


def secrets(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    for each in range(1000):
        (outside / str(each)).write_text("s3cret")
    return outside


@needs_bubblewrap
def test_a_link_that_comes_in_a_folder_s_place_while_it_is_copied_leads_nowhere(root: Path, tmp_path: Path):
    outside = secrets(tmp_path)
    with subprocess.Popen([sys.executable, "-c", SWAP, root, outside], stdout=subprocess.PIPE) as swapper:
        try:
            assert swapper.stdout is not None and swapper.stdout.readline()
            for at in range(3):
                copied = tmp_path / f"copy-{at}"
                with suppress(BadEnvironmentError, InfrastructureError):  # what is gone meanwhile cannot be copied
                    copy_tree(root, copied, live=True)
                # The link itself may be copied; what it leads to may not.
                there = [Path(folder, name) for folder, _, names in os.walk(copied) for name in names]
                assert not [path for path in there if path.read_text()]
        finally:
            swapper.kill()
