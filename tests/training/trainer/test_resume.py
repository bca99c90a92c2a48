"""A run that is killed goes on where it was: the same steps in the same order with the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from keep_training import train
from made_samples import EXACT, adapter_of, assert_same, make_samples

from openhands_rl_plugin.models.adapters.store import METRICS_FILE
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = pytest.mark.contract


def lines_of(run: Path) -> list[dict[str, float]]:
    """The metrics, without what depends on the clock."""
    lines = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
    return [timeless(line) for line in lines]


def timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "second" not in name}


@pytest.mark.parametrize(
    ("killed_at", "correction"), [(4, "truncate"), pytest.param(3, "none", marks=pytest.mark.slow)]
)
def test_a_killed_run_ends_bit_by_bit_as_one_that_was_not(
    model: Path, tmp_path: Path, killed_at: int, correction: str
) -> None:
    straight, metrics = train(model, tmp_path / "straight", correction)
    run = tmp_path / "broken"
    command = [sys.executable, "keep_training.py", str(model), str(run), correction]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2] / "helpers"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == str(killed_at):
                process.kill()
    assert process.returncode == -9
    (state,) = run.rglob("checkpoint/*/0")
    assert state.stat().st_mode & 0o077 == 0
    resumed, same = train(model, run, correction)
    assert resumed.step == straight.step == 9
    assert_same(adapter_of(resumed, tmp_path / "a"), adapter_of(straight, tmp_path / "b"))
    assert timeless(same) == timeless(metrics)
    assert [line["done"] for line in lines_of(run)] == list(range(1, 10))
    assert lines_of(run) == lines_of(tmp_path / "straight")


def test_a_checkpoint_of_another_run_is_not_continued(model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = EXACT.model_copy(update={"checkpoint_steps": 1})

    class Stopped(Exception):
        pass

    def stop(_: object) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        LocalTrainer(model, settings).reinforce(make_samples(), stop, run=tmp_path / "run")
    plain = LocalTrainer(model, settings)
    plain.reinforce(make_samples(seed=1))
    other = LocalTrainer(model, settings)
    other.reinforce(make_samples(seed=1), run=tmp_path / "run")
    assert_same(adapter_of(other, tmp_path / "a"), adapter_of(plain, tmp_path / "b"))
