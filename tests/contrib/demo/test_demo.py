"""The demo's own parts: children that cannot outlive it, its report, and a run that survives being killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from openhands_rl_plugin.apps.loop.checks import check_trainable, evaluated_by
from openhands_rl_plugin.contrib.demo.runs import DemoOptions, RepairOptions, repair_tasks, shop_tasks
from openhands_rl_plugin.training.loop.plan import LoopState
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

PARENT = """
import os, signal, sys
from pathlib import Path
from openhands_rl_plugin.apps.serving import running_command
with running_command(["env", "webshop"], Path(sys.argv[1])) as url:
    print(url, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_ends_when_the_demo_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    parent = subprocess.run(command, capture_output=True, text=True, check=False)
    assert parent.stdout.startswith("http://") and parent.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{parent.stdout.strip()}/health", timeout=5)
        except httpx.TransportError:
            return
        time.sleep(0.1)
    pytest.fail("the server outlived its parent")


def test_goals_of_demonstrations_training_and_evaluation_are_disjoint(tmp_path: Path) -> None:
    options = DemoOptions(run_directory=tmp_path)
    tasks, other = shop_tasks(options), shop_tasks(options.model_copy(update={"seed": 1}))
    names = [{entry.task.id for entry in entries} for entries in tasks[1:]]
    assert len(names[0]) == 64 and len(names[2]) == len(tasks.held_out) == 100
    assert not (names[0] & names[1] or names[0] & names[2] or names[1] & names[2])
    assert other.held_out == tasks.held_out
    assert other.training != tasks.training


def test_repair_tasks_of_demonstrations_training_and_evaluation_share_no_package_or_function(tmp_path: Path) -> None:
    options = RepairOptions(run_directory=tmp_path)
    of = {seed: repair_tasks(options.model_copy(update={"seed": seed})) for seed in (0, 1)}
    more = 992  # other bugs in the functions of the training split
    training = 300 - options.demonstrations + more
    assert [len(each) for each in of[0][1:]] == [options.demonstrations, training, 100]
    learnt = {entry.task.id for entry in (*of[0].demonstrations, *of[0].training)}
    assert len(learnt) == 300 + more and not learnt & {entry.task.id for entry in of[0].held_out}
    assert {name.partition("-")[0] for name in learnt}.isdisjoint(
        entry.task.id.partition("-")[0] for entry in of[0].held_out
    )
    assert of[0].held_out == of[1].held_out and of[0].demonstrations != of[1].demonstrations


def test_repair_is_learnt_from_what_is_proposed_and_measured_without_a_search(tmp_path: Path) -> None:
    settings = RepairOptions(run_directory=tmp_path).settings()
    check_trainable(settings)
    evaluated = evaluated_by(settings)
    assert (settings.rollout_strategy, settings.training.tree) == ("BestOfN", "proposals")
    assert evaluated is not None and (evaluated.rollout_strategy, evaluated.strategy) == ("StandardReAct", {})
    assert settings.loop.training_max_turns == settings.max_turns - 1
    hurried = RepairOptions(run_directory=tmp_path).shortened()
    check_trainable(hurried.settings())
    assert hurried.stages == 6


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", ["shop", "repair"])
def test_a_killed_run_goes_on_where_it_was(task: str, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "openhands_rl_plugin.cli", "demo", "--task", task, "--tiny"]
    command = [*program, "--run-dir", str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    state_file = tmp_path / "state.json"
    while len(LoopState.load(state_file).records) < 3:
        assert first.poll() is None
        time.sleep(0.5)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    finished = LoopState.load(state_file).records

    assert subprocess.run(command, check=False).returncode == 0
    state = LoopState.load(state_file)
    assert state.records[: len(finished)] == finished
    kind = DemoOptions if task == "shop" else RepairOptions
    assert len(state.records) == kind(run_directory=tmp_path).shortened().stages
    assert (tmp_path / "report.html").stat().st_size > 5_000
    asyncio.run(check_episodes(tmp_path, state))


async def check_episodes(directory: Path, state: LoopState) -> None:
    async with FileTrajectoryStorage(directory / "trajectories") as storage:
        stored = [trajectory async for trajectory, _ in storage.find()]
    expected = sum(record.metrics.get("episodes", 0) for record in state.records)
    assert len(stored) == len({trajectory.id for trajectory in stored}) == expected
