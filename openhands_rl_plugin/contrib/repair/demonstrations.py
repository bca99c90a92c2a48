"""Demonstrations of repair tasks for a loop: the oracle's episodes, what is right in them, and drills."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from openhands_rl_plugin.apps.loop.demonstrations import Demonstrator
from openhands_rl_plugin.apps.loop.run import LoopJob, open_player
from openhands_rl_plugin.config.host import TOOLS, host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.repair.drills import lessons
from openhands_rl_plugin.contrib.repair.oracle import ORACLE, RepairOracle
from openhands_rl_plugin.contrib.repair.oracle_server import serve_oracle
from openhands_rl_plugin.contrib.repair.rows import spec_of
from openhands_rl_plugin.contrib.repair.suites import RepairSuite
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import EpisodeRunner, TrajectoryStorage
from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.evals.runs.own_suites import require_own_suite
from openhands_rl_plugin.training.loop.stages import Lessons, LoopListener


class RepairDemonstrator(Demonstrator):
    """The oracle of repair tasks, in the same host as the policy."""

    drills = True

    @asynccontextmanager
    async def open(self, job: LoopJob, storage: TrajectoryStorage) -> AsyncIterator[EpisodeRunner]:
        """As in ``Demonstrator``."""
        instances = [entry.instance for entry in job.tasks.demonstrations if entry.instance is not None]
        with serve_oracle(RepairOracle(instances, TOOLS[host_of(job.settings)], job.settings.sampling.seed)) as url:
            own = {"base_url": url, "base_urls": (), "model": ORACLE, "api_key_env": "", "server": "auto"}
            settings = job.settings.model_copy(
                update={
                    "serving": job.settings.serving.model_copy(update=own),
                    "rollout_strategy": RLSettings().rollout_strategy,
                    "strategy": {},
                }
            )
            async with open_player(job, settings, storage) as runner:
                yield _Oracle(runner)

    def lessons(self, job: LoopJob, listener: LoopListener) -> Lessons:
        """Of the oracle's episodes what is right in them, and drills."""
        suite = require_own_suite(job.tasks.suite.name)
        assert isinstance(suite, RepairSuite)
        known = [entry.instance for entry in job.tasks.demonstrations if entry.instance is not None]
        held_out = [entry.instance for entry in job.tasks.held_out if entry.instance is not None]
        strange = frozenset(spec_of(instance).function for instance in held_out)
        loop, seed = job.settings.loop, job.settings.sampling.seed
        if (loop.drills or loop.short_drills) and job.native_tool_calling:
            option = "--drills" if loop.drills else "--short-drills"
            raise ConfigError(f"{option}: their calls are in the text: add --no-native-tool-calling, or leave it at 0")

        def made(demonstrations: Sequence[Trajectory]) -> Sequence[Trajectory]:
            found = lessons(
                demonstrations,
                known,
                tools=TOOLS[host_of(job.settings)],
                seed=seed,
                drills=loop.drills,
                short_drills=loop.short_drills,
                level=suite.level,
                strange=strange,
            )
            drills, wanted = len(found) - len(demonstrations), loop.drills + loop.short_drills
            if drills < wanted:
                listener.noted(f"Python's library gives {drills:,} drills, not {wanted:,}: all of them are used")
            return found

        return made


class _Oracle:
    """An ``EpisodeRunner`` whose episodes are no policy's."""

    def __init__(self, runner: EpisodeRunner) -> None:
        self._runner = runner

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run one episode with the oracle in the place of the policy."""
        return await self._runner.run(request.model_copy(update={"served_model": None}))

    async def close(self) -> None:
        """Does nothing: ``open`` closes what it opened."""


REPAIR = RepairDemonstrator()
