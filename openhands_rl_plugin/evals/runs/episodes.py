"""Graded episodes, evaluation tasks, and the protocol of runners."""

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
    """An episode with its score. ``trajectory.evidence`` has ``test_result``; ``verdict`` is for SWE-bench instances.

    Without a score the outcome of the attempt is unknown.
    """

    trajectory: Trajectory
    score: Score | None = None
    verdict: PatchVerdict | None = None

    @property
    def commands(self) -> tuple[Flag, ...]:
        """Flags of commands that searched for the solution elsewhere; none for tasks without a repository."""
        repo = self.trajectory.task.data.get("repo")
        return flags_of_commands(self.trajectory, repo) if isinstance(repo, str) else ()


class EvalTask(NamedTuple):
    """A task of a suite with its row of the dataset."""

    task: Task
    row: JsonObject
    instance: Instance | None = None


class EvalRunner(Protocol):
    """Rolls out and grades episodes of one suite."""

    async def run(self, request: EpisodeRequest, eval_task: EvalTask) -> GradedEpisode:
        """Roll out, store, grade and score. A failed episode is returned, not raised; a stored one is reused.

        Raises what must stop an evaluation: ``ConfigError`` and ``StorageError``.
        """
        ...


async def stored_with_scores(
    storage: TrajectoryStorage, identity: str, by: StrategySpec
) -> tuple[Trajectory, tuple[Score, ...]] | None:
    """The stored episode of an earlier process, finished or not, with its scores.

    Raises ``ConfigError`` for a finished one of another strategy than ``by``, and ``StorageError``.
    """
    where = TrajectoryFilter(ids=(identity,), finished=None)
    found = next(iter([found async for found in storage.find(where)]), None)
    if found is not None and found[0].stop is not StopReason.UNFINISHED and found[0].strategy != by:
        raise ConfigError(
            f"the store holds {found[0].task.id} of this run with {_shown(found[0].strategy)}, not {_shown(by)}: "
            "give another --note or another --store"
        )
    return found


def _shown(strategy: StrategySpec) -> str:
    return f"{strategy.name} {json.dumps(strategy.options)}" if strategy.options else strategy.name
