"""Scripted demonstrations of a suite: entry points of the group ``openhands_rl_plugin.demonstrators``, by its name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.protocols import EpisodeRunner, TrajectoryStorage

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.loop.run import LoopJob
    from openhands_rl_plugin.training.loop.stages import Lessons, LoopListener


class Demonstrator:
    """Rolls out the tasks of a suite by a script. ``drills``: whether ``[rl.loop] drills`` has a meaning there."""

    drills = False

    def check(self, settings: RLSettings) -> None:
        """Raise ``ConfigError`` where the script does not work with these settings."""

    def open(self, job: LoopJob, storage: TrajectoryStorage) -> AbstractAsyncContextManager[EpisodeRunner]:
        """The runner of the demonstrations, until the block ends."""
        raise NotImplementedError

    def lessons(self, job: LoopJob, listener: LoopListener) -> Lessons | None:
        """What of the episodes is imitated; ``None``: all. Raises ``ConfigError``."""
        return None


def demonstrator_of(suite: str) -> Demonstrator | None:
    """The demonstrator of the suite of that name. Raises ``ConfigError`` for one that cannot be loaded."""
    return registry.find("demonstrators", suite) if suite in registry.names("demonstrators") else None


@asynccontextmanager
async def open_demonstrator(job: LoopJob, storage: TrajectoryStorage) -> AsyncIterator[EpisodeRunner | None]:
    """The runner of the job's demonstrations; ``None`` where it has none."""
    found = demonstrator_of(job.tasks.suite.name) if job.tasks.demonstrations else None
    if found is None:
        yield None
        return
    async with found.open(job, storage) as runner:
        yield runner
