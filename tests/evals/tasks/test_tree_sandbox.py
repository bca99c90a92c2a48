"""What a repository's tests can do to the sandbox that tries them, and to the host that reads their report."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits
from openhands_rl_plugin.evals.tasks import sandbox as tree_sandbox
from openhands_rl_plugin.evals.tasks.sandbox import TreeSandbox
from openhands_rl_plugin.evals.tasks.trees import PLAIN, SourceTree, TreeFile

pytestmark = needs_bubblewrap


def run(test: str) -> tree_sandbox.TestRun:
    tree = SourceTree({"test_it.py": TreeFile(PLAIN, f"import atexit, os\n\ndef test_it():\n    {test}\n".encode())})
    return TreeSandbox(Path(sys.prefix), ("",), 30.0).run_tests(tree, ["test_it.py"])


@pytest.mark.parametrize("trap", ["os.mkfifo(name)", "os.symlink('/dev/zero', name)"])
def test_the_host_waits_at_no_pipe_and_follows_no_link(trap: str):
    """Left in place of the report, when pytest has ended."""
    code = f"name = '/tmp/out/report.json'; atexit.register(lambda: (os.path.exists(name) and os.unlink(name), {trap}))"
    began = time.monotonic()
    assert run(code).crashed and time.monotonic() - began < 25


def test_processes_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tree_sandbox, "_LIMITS", SandboxLimits(processes=20))
    ran = run("import subprocess; [subprocess.Popen(['sleep', '20']) for _ in range(40)]; import time; time.sleep(20)")
    assert "more than 20 processes" in ran.crashed and ran.seconds < 15
