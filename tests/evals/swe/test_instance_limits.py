"""Graded tests are bounded as a whole: processes, memory and what they add to the repository. The bombs are small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits
from openhands_rl_plugin.evals.swe.backends.interpreters import find_python
from openhands_rl_plugin.evals.swe.backends.sandbox import InstanceSandbox, Room

MEBIBYTE = 1024**2
LIMITS = SandboxLimits(processes=64, memory=128 * MEBIBYTE, disk=32 * MEBIBYTE)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("for i in $(seq 100); do sleep 5 & done; wait", "more than 64 processes and threads"),
        (
            "for i in 1 2 3 4; do head -c 60M /dev/zero | tail -c 60M | sleep 5 & done; wait",
            "more than 128 MiB of memory",
        ),
        ("for i in $(seq 60); do head -c 2M /dev/zero > big$i; sleep 0.05; done", "added more than 32 MiB"),
        ("exit 7", ""),
    ],
)
@needs_bubblewrap
def test_who_goes_beyond_a_bound_is_ended(command: str, said: str, tmp_path: Path):
    for name in ("layer/testbed", "layer/root", "layer/conda", "tmp"):
        (tmp_path / name).mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    sandbox = InstanceSandbox(find_python(version), "", LIMITS)
    wrapped = sandbox.wrap(Room(tmp_path / "layer", tmp_path / "tmp"), ["bash", "-c", command], network=False)
    done = subprocess.run(wrapped, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == (137 if said else 7) and said in done.stderr
