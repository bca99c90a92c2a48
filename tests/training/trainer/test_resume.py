"""A run that is killed goes on where it was: the same steps in the same order with the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from keep_training import train
from made_samples import EXACT, adapter_of, assert_same, make_samples

from openhands_rl_plugin.models.adapters.store import METRICS_FILE
from openhands_rl_plugin.training.trainer.metrics import STATE_FILE
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = pytest.mark.contract


def lines_of(run: Path) -> list[dict[str, float]]:
    """The metrics, without what depends on the clock."""
    lines = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


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
    (state,) = run.rglob(STATE_FILE)
    assert state.stat().st_mode & 0o077 == 0
    resumed, same = train(model, run, correction)
    assert resumed.step == straight.step == 9
    assert_same(adapter_of(resumed, tmp_path / "a"), adapter_of(straight, tmp_path / "b"))
    assert replace(same, seconds=0.0) == replace(metrics, seconds=0.0)
    assert [line["done"] for line in lines_of(run)] == list(range(1, 10))
    assert lines_of(run) == lines_of(tmp_path / "straight")


def test_metrics_of_another_run_are_set_aside(model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for seed in range(3):
        trainer = LocalTrainer(model, EXACT)
        trainer.sft(make_samples(seed=seed), run=tmp_path / "run")
        trainer.finish()
    names = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert names == ["metrics-000001.jsonl", "metrics-000002.jsonl", METRICS_FILE]
    assert len((tmp_path / "run" / names[0]).read_text().splitlines()) == 6


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
