"""The oracle of repair tasks in the host that is installed, with commands and edits in the sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.apps.loop.run import LoopJob
from openhands_rl_plugin.apps.loop.tasks import LoopTasks, TaskSource, demonstrator_of, loop_tasks
from openhands_rl_plugin.config.rl import LoopSettings, RLSettings, ServingSettings, WorkspaceSettings
from openhands_rl_plugin.contrib.repair.oracle import ORACLE
from openhands_rl_plugin.contrib.repair.suites import RepairBackend
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import EpisodeRequest
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SETTINGS = RLSettings(
    serving=ServingSettings(base_url="http://127.0.0.1:1/v1", model="m"),
    workspace=WorkspaceSettings(prompt="compact"),
    loop=LoopSettings(demonstrations=4, held_out=5),
    max_turns=12,
)


def test_a_loop_over_repair_tasks_holds_out_packages():
    tasks = loop_tasks(TaskSource(suite="repair-1"), SETTINGS)
    used = [{entry.instance.repo for entry in part if entry.instance} for part in (tasks.training, tasks.held_out)]
    assert len(tasks.demonstrations) == 4 and len(tasks.held_out) == 5 and not used[0] & used[1]


def test_demonstrations_are_of_suites_with_a_script():
    with pytest.raises(ConfigError, match="swe-local has no scripted ones, only repair-1"):
        loop_tasks(TaskSource(suite="swe-local"), SETTINGS)


def demonstrations(directory: Path) -> LoopJob:
    """A loop over the demonstrations of a suite alone."""
    tasks = loop_tasks(TaskSource(suite="repair-1"), SETTINGS)
    return LoopJob(
        settings=SETTINGS,
        tasks=LoopTasks(tasks.suite, tasks.demonstrations, (), ()),
        model=directory,
        directory=directory,
        run_id="demo",
        limits=SETTINGS.limits(),
        backend=RepairBackend(),
        native_tool_calling=False,
    )


@needs_bubblewrap
@pytest.mark.slow
async def test_the_oracle_repairs_inside_the_host(tmp_path: Path):
    storage = FileTrajectoryStorage(tmp_path / "trajectories")
    job = demonstrations(tmp_path)
    requests = [
        EpisodeRequest(task=entry.task, run_id="demo", group_id="g", served_model="m")
        for entry in job.tasks.demonstrations
    ]
    script = demonstrator_of(job.tasks.suite.name)
    assert script is not None
    async with script.open(job, storage) as oracle:
        episodes = await asyncio.gather(*map(oracle.run, requests))
    await storage.close()
    for episode in episodes:
        assert episode.failure is None and episode.policy.served_name == ORACLE
        report = episode.evidence["test_result"]
        assert isinstance(report, dict) and report["report"]["resolved"], episode.messages()
        texts = [str(message) for message in episode.messages() if message.role == "assistant"]
        assert "finish" in texts[-1] and "run_tests.py" in texts[-2]
