"""The benchmarks that need no model, peer or suite run: they are kept up with the code that they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SHORT = {
    "recording": ["--quick"],
    "search": ["--repeats", "1", "--simulations", "20"],
    "sessions": ["--sessions", "2", "--commands", "2"],
    "packing": [],
    "parsing": ["--repeats", "1"],
    "storage": ["--repeats", "1", "--sessions", "2", "--trajectories", "2000"],
    "harness": ["--instances", "2", "--workers", "1", "--repeats", "1"],
    "reload": ["--clients", "2", "--reloads", "2"],
    "generation": ["--context", "40", "--batch", "1", "2"],
    "verifier": ["--attempts", "2", "--length", "64", "--repeats", "1"],
    "conversion": ["--repeats", "1"],
    "fork": ["--repeats", "1", "--forks", "2"],
    "async_loop": ["--repeats", "1", "--iterations", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"evaluation.performance.{name}", *SHORT[name]]
    if name == "storage":
        command += ["--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(letter.isdigit() for letter in done.stdout), "it prints no figure"
