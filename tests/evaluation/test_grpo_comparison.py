"""The budget and the figures of ``evaluation.performance.grpo.compare``, without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.performance.grpo.budget import read_marks
from evaluation.performance.grpo.report import Part, difference, overall, read_parts, report

BURNING = """
import subprocess, sys
from pathlib import Path
from evaluation.performance.grpo.budget import CpuBudget

budget, step = CpuBudget(1.0, Path(sys.argv[1])), 0
budget.end_process_when_spent()
budget.begin()
while True:
    subprocess.run([sys.executable, "-c", "sum(range(4_000_000))"], check=True)
    step += 1
    budget.mark(step, Path(f"step-{step}"), {"reward": 0.5})
"""


def test_a_budget_counts_children_and_ends_the_process(tmp_path: Path) -> None:
    marks = tmp_path / "marks.jsonl"
    done = subprocess.run([sys.executable, "-c", BURNING, str(marks)], timeout=120, check=False)
    assert done.returncode == 0
    found = read_marks(marks)
    assert found and [mark.step for mark in found] == list(range(1, len(found) + 1))
    times = [mark.cpu_seconds for mark in found]
    assert times == sorted(times) and times[0] > 0 and times[-1] <= 1.0


def _part(side: str, seed: int, **returns: float) -> Part:
    return Part(side=side, seed=seed, minutes=30, returns=returns)


def test_differences_are_means_over_goals_that_both_sides_tried() -> None:
    parts = [
        _part("trl", 0, a=0.5, b=1.0, c=0.0),
        _part("ours", 0, a=1.0, b=1.0, d=1.0),
        _part("trl", 1, a=0.0, b=0.0),
        _part("ours", 1, a=1.0, b=0.9),
        _part("trl", 2, a=1.0),  # the other side is not there
    ]
    found = difference(parts, "trl", "ours")
    assert (found.n, found.mean) == (2, 0.5)
    assert found.low == 0.0 and found.high == 1.0
    assert (overall(parts, "trl").n, overall(parts, "trl").mean) == (6, pytest.approx(2 / 6))


def test_a_report_over_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        for side, value in (("sft", 0.0), ("ours", 1.0), ("trl", 0.5)):
            file = tmp_path / str(seed) / f"{side}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(_part(side, seed, a=value, b=0.0).model_dump_json())
    report([tmp_path / "0", tmp_path / "1"])
    printed = capsys.readouterr().out
    assert "ours - trl: +0.500" in printed and "trl - sft: +0.000" in printed
    with pytest.raises(SystemExit, match="another sft of seed 0"):
        read_parts([tmp_path / "0", tmp_path / "0"])
    with pytest.raises(SystemExit, match="holds no finished side"):
        read_parts([tmp_path])
