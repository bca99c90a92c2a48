"""File access on behalf of a session never leaves its workspace."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from openhands_rl_plugin.environments.workspace.files import MAX_FILE_BYTES, Workspace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "workspace"
    (root / "dir" / "sub").mkdir(parents=True)
    (root / "file").write_text("text")
    (tmp_path / "secret").write_text("s3cret")
    return root


@pytest.fixture
def files(root: Path) -> Workspace:
    return Workspace(root)


@pytest.mark.parametrize("path", ["file", "/workspace/file", "./dir/../file", "/workspace//dir/./../file"])
def test_names_of_a_file(files: Workspace, path: str):
    assert files.read(path) == b"text"


def test_the_host_name_works_too(files: Workspace, root: Path):
    assert files.read(str(root / "file")) == b"text"


@pytest.mark.parametrize(
    "path", ["../secret", "/workspace/../secret", "dir/../../secret", "/etc/passwd", "/workspace2/file", "..", "a\0b"]
)
def test_paths_that_leave_are_refused(files: Workspace, path: str):
    with pytest.raises(PermissionError):
        files.read(path)
    with pytest.raises(PermissionError):
        files.write(path, b"x")


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "/workspace/../secret", "dir/../../secret", "/"])
def test_links_that_leave_are_refused(files: Workspace, root: Path, target: str):
    (root / "link").symlink_to(target)
    for path in ("link", "link/etc/passwd"):
        with pytest.raises(PermissionError):
            files.read(path)
    with pytest.raises(PermissionError):
        files.write("link", b"x")
    assert (root.parent / "secret").read_text() == "s3cret"


@pytest.mark.parametrize("target", ["file", "dir/../file", "/workspace/file", "second"])
def test_links_inside_work(files: Workspace, root: Path, target: str):
    (root / "second").symlink_to("/workspace/file")
    (root / "link").symlink_to(target)
    assert files.read("link") == b"text"
    files.write("link", b"new")
    assert (root / "file").read_text() == "new" and (root / "link").is_symlink()


def test_a_loop_of_links_ends(files: Workspace, root: Path):
    (root / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        files.read("loop")


def test_a_link_swapped_in_while_a_path_is_walked_never_leaks(files: Workspace, root: Path, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("s3cret")
    (root / "real").mkdir()
    (root / "real" / "file").write_text("text")
    os.symlink(tmp_path / "outside", root / "evil")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(root / "real", root / "spare")
            os.rename(root / "evil", root / "real")
            os.rename(root / "real", root / "evil")
            os.rename(root / "spare", root / "real")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(2000):
            try:
                assert files.read("real/file") == b"text"
            except OSError:
                continue
    finally:
        stop.set()
        thread.join()


def test_special_files_are_refused_and_do_not_block(files: Workspace, root: Path):
    os.mkfifo(root / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        files.read("pipe")
    with pytest.raises(OSError):
        files.write("pipe", b"x")
    with pytest.raises(OSError):
        files.read("dir")


def test_large_files_are_refused(files: Workspace, root: Path):
    (root / "large").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    with pytest.raises(OSError, match="larger than 10 MiB"):
        files.read("large")


def test_writing_makes_parents_and_keeps_the_mode(files: Workspace, root: Path):
    files.write("new/deep/file", b"1")
    assert (root / "new/deep/file").read_bytes() == b"1"
    (root / "file").chmod(0o755)
    files.write("file", b"longer than before")
    files.write("file", b"short")
    assert (root / "file").read_bytes() == b"short" and (root / "file").stat().st_mode & 0o777 == 0o755


def test_listing(files: Workspace, root: Path):
    (root / "link").symlink_to("/etc")
    assert files.entries("/workspace") == [("dir", "directory"), ("file", "file"), ("link", "other")]
    (root / "dir/sub/deep").write_text("")
    assert sorted(files.files(".")) == ["dir/sub/deep", "file"]
    assert [files.kind(path) for path in ("dir", "file", "nothing", "file/below")] == ["directory", "file", None, None]
