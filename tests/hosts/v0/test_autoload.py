"""What every Python process pays for the .pth file, and that nothing broken in the plugin reaches the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import openhands_rl_plugin

WATCH = "AgentHubWatch"


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, with the .pth file of the installed package in effect."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environ},
        timeout=60,
        check=True,
    )


def python_without_site(code: str) -> str:
    """Output of an interpreter that reads no .pth files."""
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def finders(**environ: str) -> list[str]:
    code = "import sys, json; print(json.dumps([getattr(f, '__name__', '') for f in sys.meta_path]))"
    return json.loads(python(code, **environ).stdout)


def fake_openhands(folder: Path) -> str:
    """An ``openhands`` whose agents import but which has nothing that the plugin needs."""
    hub = folder / "openhands" / "agenthub"
    hub.mkdir(parents=True)
    (folder / "openhands" / "__init__.py").touch()
    (hub / "__init__.py").write_text("LOADED = True\n")
    return str(folder)


def test_interpreter_start_adds_one_finder():
    assert finders().count(WATCH) == 1


def test_the_import_at_interpreter_start_loads_nothing_else():
    root = Path(openhands_rl_plugin.__file__).parents[1]
    done = python_without_site(
        f"import os, sys; sys.path.insert(0, {str(root)!r}); before = set(sys.modules);"
        "import openhands_rl_plugin.hosts.v0.autoload; print(*sorted(set(sys.modules) - before))"
    )
    ours = {f"openhands_rl_plugin{part}" for part in ("", ".hosts", ".hosts.v0", ".hosts.v0.autoload")}
    assert set(done.split()) == ours | {"__future__"}


def test_switched_off_by_environment_variable():
    assert WATCH not in finders(OPENHANDS_RL_AUTOLOAD="0")


def test_host_survives_a_plugin_that_cannot_load(tmp_path):
    code = "import openhands.agenthub as hub, sys; print(hub.LOADED, [f for f in sys.meta_path if 'Watch' in str(f)])"
    done = python(code, PYTHONPATH=fake_openhands(tmp_path))
    assert done.stdout == "True []\n"
    assert done.stderr.count("openhands_rl_plugin could not register RLAgent") == 1
    assert "OPENHANDS_RL_AUTOLOAD=0" in done.stderr
    assert "Traceback" not in done.stderr


def test_switched_off_host_is_not_touched(tmp_path):
    done = python("import openhands.agenthub", PYTHONPATH=fake_openhands(tmp_path), OPENHANDS_RL_AUTOLOAD="0")
    assert done.stderr == ""


def test_other_imports_pass_by():
    done = python("import wave, sys; print(sum('Watch' in str(f) for f in sys.meta_path))")
    assert done.stdout == "1\n"


def python_with_the_line(folder: Path, *more: Path) -> subprocess.CompletedProcess[str]:
    """An interpreter whose only site directory is ``folder``, which has the .pth file."""
    line = Path(openhands_rl_plugin.__file__).parent / "hosts" / "v0" / "autoload.pth"
    (folder / "openhands_rl_autoload.pth").write_bytes(line.read_bytes())
    code = (
        f"import site, sys; sys.path[1:1] = {[str(path) for path in more]!r}; site.addsitedir({str(folder)!r});"
        "print([getattr(each, '__name__', '') for each in sys.meta_path])"
    )
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=folder, env={})


def test_the_line_is_silent_where_the_package_is_hidden(tmp_path: Path):
    done = python_with_the_line(tmp_path)
    assert WATCH not in done.stdout and done.stderr == ""


def test_the_line_begins_to_wait_where_the_package_is_there(tmp_path: Path):
    done = python_with_the_line(tmp_path, Path(openhands_rl_plugin.__file__).parents[1])
    assert done.stdout.count(WATCH) == 1 and done.stderr == ""
