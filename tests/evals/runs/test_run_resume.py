"""Evaluations that are killed and go on: no instance is lost, and none is done twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.run_files import RunFolder
from openhands_rl_plugin.evals.runs.suites import find_suite
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract

HERE = Path(__file__).parent
RUNS = 2


def start(folder: Path, instances: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "killed_run.py"), str(folder), str(instances)]
    root, helpers = HERE.parents[2], HERE.parents[1] / "helpers"
    environ = {**os.environ, "PYTHONPATH": f"{root}:{helpers}"}
    # A session of its own, whose processes are all killed.
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True, env=environ)


@pytest.mark.parametrize(
    ("kills", "instances"), [(2, 8), pytest.param(100, 300, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
async def test_killed_at_any_moment(tmp_path: Path, kills: int, instances: int):
    chance = random.Random(kills)
    killed, left = 0, RUNS * instances
    while True:
        process = start(tmp_path, instances)
        assert process.stdout is not None
        before, left = left, int(process.stdout.readline())
        assert left <= before, "what was done stays done"
        if killed == kills or left == 0:
            break
        # After a few episodes or verdicts, at any moment of the next one, and sometimes before the first.
        wanted_steps, before_start = chance.choice((0, 0, 1, 2, 5)), steps(tmp_path)
        while process.poll() is None and steps(tmp_path) < before_start + wanted_steps:
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        killed += 1
    assert process.wait() == 0
    if kills <= 2:
        assert killed == kills, "everything was done too early"
    wanted = {(f"owner__adder-{number}", run) for number in range(instances) for run in range(RUNS)}
    rows = [json.loads(line) for file in (tmp_path / "out").rglob("output.jsonl") for line in file.open()]
    assert Counter((row["instance_id"], row["test_result"]["outcome"]["run"]) for row in rows) == Counter(wanted)
    assert all(row["test_result"]["report"]["resolved"] for row in rows)
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        stored = [found async for found in storage.find(TrajectoryFilter(finished=None))]
    assert Counter((trajectory.task.id, int(trajectory.run_id[-1])) for trajectory, _ in stored) == Counter(wanted)
    assert not [trajectory for trajectory, _ in stored if trajectory.stop is StopReason.UNFINISHED]
    assert all(scores and scores[-1].reward == 1.0 for _, scores in stored)
    assert not (tmp_path / "out" / ".work").exists()
    ended = Counter((tmp_path / "finished.log").read_text().splitlines())
    assert max(ended.values()) == 1, "a finished episode is not rolled out again"
    print(f"{killed} kills, {len(wanted)} attempts")


def steps(folder: Path) -> int:
    """How much has happened: episodes that ended, and lines that were written."""
    files = [folder / "finished.log", *(folder / "out").rglob("output.jsonl")]
    return sum(file.read_bytes().count(b"\n") for file in files if file.exists())


def test_half_a_line_is_cut_off_and_its_instance_runs_again(tmp_path: Path):
    settings = RLSettings(serving=ServingSettings(model="m", base_url="http://127.0.0.1:1/v1"))
    plan = EvaluationPlan(suite=find_suite("swe-local"), agent="RLAgent", settings=settings, out=tmp_path)
    (run,) = plan.each_run()
    output = plan.run_directory(run) / "output.jsonl"
    output.parent.mkdir(parents=True)
    rows = ({"instance_id": "a", "history": ["x" * 200_000]}, {"instance_id": "b"})
    whole = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    for cut in (1, 10, len(whole) - 100_000):
        output.write_bytes(whole[:-cut])
        with closing(RunFolder(plan, run)) as folder:
            assert folder.done == ({"a"} if cut <= 10 else set())
        assert output.read_bytes() in (whole[: whole.index(b"\n") + 1], b"")
