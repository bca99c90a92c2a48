"""What commands in a sandbox can reach of the host, in every kind of sandbox: nothing that was planted there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import needs_bubblewrap
from plants import REACH, abstract_sockets, planted, write_attempt

from openhands_rl_plugin.contrib.repair.suites import RepairBackend
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox, Sandbox, SubprocessSandbox
from openhands_rl_plugin.environments.workspace.shell import Shell
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.evals.swe.backends import InstanceSandbox, find_python
from openhands_rl_plugin.evals.swe.instances import Instance
from openhands_rl_plugin.evals.tasks.make import NO_OP

pytestmark = needs_bubblewrap
Attempt = Callable[[Path, list[str]], str]
_FEWEST = 60 if os.geteuid() == 0 else 12


def in_shell(sandbox: Sandbox, root: Path, lines: list[str]) -> str:
    write_attempt(root, lines)
    shell = Shell(sandbox)
    try:
        return shell.run(f"python3 {sandbox.workspace}/reach.py {sandbox.workspace}/plants", timeout=60).output
    finally:
        shell.close()


def agent(folder: Path, lines: list[str]) -> str:
    root = folder / "work"
    root.mkdir()
    return in_shell(BubblewrapSandbox(root), root, lines)


def agent_of_a_task(folder: Path, lines: list[str]) -> str:
    root = folder / "work"
    root.mkdir()
    return in_shell(BubblewrapSandbox(root, task_workspace=TaskWorkspace(root=root)), root, lines)


def swe(folder: Path, lines: list[str], *, setup: bool = False) -> str:
    for name in ("testbed", "root", "conda"):
        (folder / "layer" / name).mkdir(parents=True)
    (folder / "tmp").mkdir()
    write_attempt(folder / "layer" / "testbed", lines)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    sandbox = InstanceSandbox(find_python(version), "", folder / "layer", folder / "tmp")
    program = ["/opt/miniconda3/host-python", "reach.py", "plants"]
    command = sandbox.wrap(program, network=setup, setup=setup)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


def swe_setup(folder: Path, lines: list[str]) -> str:
    return swe(folder, lines, setup=True)


def checks_of_a_task(folder: Path, lines: list[str]) -> str:
    caught = "import contextlib, io, sys\ndef f():\n    sys.argv[1:], printed = ['plants'], io.StringIO()\n"
    module = f"{caught}    with contextlib.redirect_stdout(printed):\n        exec({REACH!r}, {{}})\n"
    module += "    return printed.getvalue()\n"
    files = {"m.py": module, "plants": "".join(f"{line}\n" for line in lines)}
    spec = {"path": "m.py", "function": "f", "files": files, "calls": [[[], {}]], "expected": [repr("TRIED\n")]}
    known = {**spec, "line": 1, "shown": 1, "package": "", "license": "", "kind": ""}
    row = Instance(
        instance_id="a", repo="a", base_commit="0" * 40, fail_to_pass=("t.py::test_1",), extra={"repair": known}
    )
    verdict = asyncio.run(RepairBackend().grade(row, NO_OP, logs=folder / "logs", timeout=60))
    return "TRIED\n" if verdict.resolved else (folder / "logs/test_output.txt").read_text()


@pytest.mark.parametrize("attempt", [agent, agent_of_a_task, swe, swe_setup, checks_of_a_task])
def test_nothing_of_the_host_is_reached(attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k3y")
    beside = tmp_path / "beside"
    beside.mkdir()
    with planted(beside, Path.cwd()) as lines, abstract_sockets() as abstract:
        assert len(lines) >= _FEWEST
        # Who installs packages shares the network of the host, and with it the sockets that have no file.
        reported = attempt(tmp_path, [*lines, *([] if attempt is swe_setup else abstract)])
    assert reported == "TRIED\n"


def test_without_isolation_all_of_it_is_reached(tmp_path: Path):
    """So that the attempts above could have succeeded."""
    root = tmp_path / "work"
    root.mkdir()
    with planted(tmp_path) as lines, abstract_sockets() as abstract:
        reported = in_shell(SubprocessSandbox(root, tmp_path / "private"), root, [*lines, *abstract])
    # Root owns the kernel's settings, without any capability; some in /proc/pressure are everybody's.
    assert reported.count("REACHED kernel") == 1 or os.geteuid() != 0
    assert {*lines, *abstract} - {line.removeprefix("REACHED ") for line in reported.splitlines()} == set()


def test_files_of_the_system_with_secrets_are_not_there(tmp_path: Path):
    shell = Shell(BubblewrapSandbox(tmp_path))
    names = "/etc/shadow /etc/gshadow /etc/pip.conf /etc/ssl/private /etc/ssh /sys"
    assert shell.run(f"for each in {names}; do [ -e $each ] && echo $each; done; echo on", timeout=20).output == "on\n"
    shell.close()
