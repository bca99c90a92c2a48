"""The benchmarks that need no model, peer or suite run: they are kept up with the code that they measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SHORT = {
    "search.overhead": ["--repeats", "1", "--simulations", "20"],
    "hosts.sessions": ["--sessions", "2", "--commands", "2"],
    "training.packing": [],
    "storage.compare": ["--repeats", "1", "--sessions", "2", "--trajectories", "2000"],
    "storage.arrays": ["--repeats", "1", "--episodes", "4"],
    "hosts.harness": ["--instances", "2", "--workers", "1", "--repeats", "1"],
    "serving.reload": ["--clients", "2", "--reloads", "2"],
    "serving.generation": ["--context", "40", "--batch", "1", "2"],
    "serving.verifier": ["--attempts", "2", "--length", "64", "--repeats", "1"],
    "search.fork": ["--repeats", "1", "--forks", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"evaluation.performance.{name}", *SHORT[name]]
    if name == "storage.compare":
        command += ["--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(letter.isdigit() for letter in done.stdout), "it prints no figure"
