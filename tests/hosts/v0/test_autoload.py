"""What the .pth file costs every Python process, and that nothing broken in the plugin reaches the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import openhands_rl_plugin

WATCH = "AgentHubWatch"
LINE = Path(openhands_rl_plugin.__file__).parent / "hosts" / "v0" / "autoload.pth"
SOURCES = Path(openhands_rl_plugin.__file__).parents[1]
FINDERS = "print([getattr(each, '__name__', '') for each in sys.meta_path])"
HOST = "import openhands.agenthub as hub; print(hub.LOADED, [f for f in sys.meta_path if 'Watch' in str(f)])"


def python(folder: Path, *more: Path, code: str = FINDERS, **environ: str) -> subprocess.CompletedProcess[str]:
    """An interpreter whose only site directory is ``folder``, which has the .pth file; it lists what it imports."""
    (folder / "openhands_rl_autoload.pth").write_bytes(LINE.read_bytes())
    begin = f"import site, sys; sys.path[1:1] = {[str(path) for path in more]!r}; site.addsitedir({str(folder)!r})"
    command = [sys.executable, "-S", "-X", "importtime", "-c", f"{begin}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=folder, env=environ)


def beside(done: subprocess.CompletedProcess[str]) -> str:
    """Standard error without the list of imports, but with those of this package."""
    lines = done.stderr.splitlines()
    return "\n".join(line for line in lines if not line.startswith("import time:") or "openhands_rl" in line)


@pytest.fixture
def openhands(tmp_path: Path) -> Path:
    """An ``openhands`` whose agents import but which has nothing that the plugin needs."""
    hub = tmp_path / "openhands" / "agenthub"
    hub.mkdir(parents=True)
    (tmp_path / "openhands" / "__init__.py").touch()
    (hub / "__init__.py").write_text("LOADED = True\n")
    return tmp_path


@pytest.mark.parametrize("more", [(), (SOURCES,)], ids=["hidden", "there"])
def test_a_process_without_openhands_waits_and_imports_nothing(more: tuple[Path, ...], tmp_path: Path) -> None:
    done = python(tmp_path, *more, code=f"import wave; {FINDERS}")
    assert done.stdout.count(WATCH) == 1 and beside(done) == ""


def test_a_host_goes_on_with_a_plugin_that_cannot_load(openhands: Path) -> None:
    done = python(openhands, SOURCES, code=HOST)
    assert done.stdout == "True []\n" and "Traceback" not in done.stderr
    assert done.stderr.count("openhands_rl_plugin could not register RLAgent") == 1
    assert "OPENHANDS_RL_AUTOLOAD=0" in done.stderr


def test_switched_off_nothing_is_imported(openhands: Path) -> None:
    done = python(openhands, SOURCES, code=HOST, OPENHANDS_RL_AUTOLOAD="0")
    assert done.stdout == "True []\n" and beside(done) == ""
