"""An episode together with what its grader said, and who plays such episodes."""

from __future__ import annotations

import json
from typing import NamedTuple, Protocol

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import EpisodeRequest, JsonObject, Score, StopReason, StrategySpec, Task, Trajectory
from openhands_rl_plugin.evals.swe.guard.commands import flags_of_commands
from openhands_rl_plugin.evals.swe.types import Flag, Instance, PatchVerdict


class GradedEpisode(NamedTuple):
    """``trajectory`` has the report of its tests in its evidence; ``verdict`` is there for software tasks only.

    Without a score nothing is known about the attempt.
    """

    trajectory: Trajectory
    score: Score | None = None
    verdict: PatchVerdict | None = None

    @property
    def commands(self) -> tuple[Flag, ...]:
        """What the agent did to find the solution elsewhere; nothing in tasks without a repository."""
        repo = self.trajectory.task.data.get("repo")
        return flags_of_commands(self.trajectory, repo) if isinstance(repo, str) else ()


class EvalTask(NamedTuple):
    """A task of a suite: how it is played, and its row of the dataset."""

    task: Task
    row: JsonObject
    instance: Instance | None = None


class EvalRunner(Protocol):
    """Plays and judges episodes of one suite."""

    async def run(self, request: EpisodeRequest, eval_task: EvalTask) -> GradedEpisode:
        """Play, store, judge and score. A failed episode is returned, not raised; what is stored is not played again.

        Raises what must stop an evaluation: ``ConfigError`` and ``StorageError``.
        """
        ...


async def stored_with_scores(
    storage: TrajectoryStorage, identity: str, by: StrategySpec
) -> tuple[Trajectory, tuple[Score, ...]] | None:
    """What an earlier process left of an episode, finished or not, with its scores.

    Raises ``ConfigError`` for a finished one that another strategy than ``by`` played, and ``StorageError``.
    """
    where = TrajectoryFilter(ids=(identity,), finished=None)
    found = next(iter([found async for found in storage.find(where)]), None)
    if found is not None and found[0].stop is not StopReason.UNFINISHED and found[0].strategy != by:
        raise ConfigError(
            f"the store has {found[0].task.id} of this run as {_shown(found[0].strategy)} played it, not {_shown(by)}: "
            "tell this run apart by --note, or give another --store"
        )
    return found


def _shown(strategy: StrategySpec) -> str:
    return f"{strategy.name} {json.dumps(strategy.options)}" if strategy.options else strategy.name
