"""Runs ``train_together.py`` in several processes, and compares what they train with what one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import free_port
from made_samples import assert_same
from safetensors.torch import load_file
from train_together import train

from openhands_rl_plugin.training.trainer.metrics import STATE_FILE

HERE = Path(__file__).parent


def run_together(
    model: Path,
    out: Path,
    changes: Mapping[str, Any],
    *kinds: str,
    steps: int = 0,
    size: int = 2,
    program: str = "train_together.py",
) -> tuple[list[int], list[str]]:
    """The exit statuses and what was written on stderr, by rank."""
    port = free_port()
    words = [program, model, out, json.dumps(dict(changes)), steps, *kinds]
    processes = [_started(rank, size, port, words) for rank in range(size)]
    try:
        printed = [process.communicate(timeout=280)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], printed


def _started(rank: int, size: int, port: int, words: list[Any]) -> subprocess.Popen[bytes]:
    """A process as a launcher starts it."""
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **{name: str(value) for name, value in launcher.items()}, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(command, cwd=HERE, env={**environment, "PYTHONPATH": paths}, stderr=subprocess.PIPE)


def train_both(
    model: Path, out: Path, changes: Mapping[str, Any], *kinds: str, steps: int = 0, size: int = 2
) -> list[int]:
    """The exit statuses. Fails where a process failed otherwise than after ``steps``."""
    statuses, printed = run_together(model, out, changes, *kinds, steps=steps, size=size)
    if any(statuses) and not any("killed" in each for each in printed):
        raise AssertionError(printed)
    return statuses


def check_same(model: Path, together: Path, alone: Path, kind: str) -> None:
    """The same numbers from both, but for the order of sums."""
    torch.set_num_threads(1)
    expected = train(model, alone, kind)
    found = json.loads((together / kind / "metrics.json").read_text())
    # The norm adds up every gradient, and with them the rounding of two orders of sums.
    assert found.pop("grad_norm") == pytest.approx(expected.pop("grad_norm"), rel=2e-5)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    ours, theirs = (torch.load(each / kind / STATE_FILE) for each in (together, alone))
    for name, moments in theirs["moments"].items():
        assert_same(ours["moments"][name], moments, tolerance=1e-5)
    # Adam makes a step of any size out of a gradient that is nearly zero: a few weights may differ by such a step.
    far = torch.cat([(ours["weights"][name] - each).abs().flatten() for name, each in theirs["weights"].items()])
    assert (far > 1e-4).float().mean() < 1e-3 and far.max() < 2e-3


def check_same_model(model: Path, together: Path, alone: Path, kind: str, *, parts: float = 1.0) -> None:
    """The same figures and nearly the same weights, of which a rank holds a share only."""
    torch.set_num_threads(1)
    expected = train(model, alone, kind)
    found = json.loads((together / kind / "metrics.json").read_text())
    assert found.pop("parts") == expected.pop("parts") * parts
    # The norm adds up every gradient of the model, and with them the rounding of two orders of sums.
    assert found.pop("grad_norm") == pytest.approx(expected.pop("grad_norm"), rel=5e-5)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    ours, theirs = (load_file(each / kind / "model" / "model.safetensors") for each in (together, alone))
    assert ours.keys() == theirs.keys()
    before = load_file(model / "model.safetensors")
    for name, weight in ours.items():
        assert weight.dtype == torch.float32
        moved = (theirs[name].float() - before[name].float()).norm()
        # Adam makes a step of any size out of a gradient that is nearly zero, so that single weights show little.
        assert (weight.float() - theirs[name].float()).norm() <= moved * 0.01, name
