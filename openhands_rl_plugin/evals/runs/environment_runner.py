"""Tasks of an environment server, which returns the rewards itself."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.success import SuccessRule
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, JsonObject, Score, StopReason, StrategySpec, Task, Trajectory
from openhands_rl_plugin.evals.runs.outcome import EvalTask, GradedEpisode, stored_with_scores
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.swe.dataset import read_rows
from openhands_rl_plugin.hosts.pool import HostRunner
from openhands_rl_plugin.rollout.scoring import judge

_AS_RETURNED = "return-1"
CERTAIN = SuccessRule()
_NO_NAME = re.compile(r"[^\w.-]+")
_ROW_NAMES = ("id", "task_id", "instance_id", "task", "name")
_LONGEST_NAME = 100


class EnvironmentRunner:
    """Rolls out tasks with ``host``, which stores episodes. An episode that is a ``success`` resolves its task."""

    def __init__(
        self,
        plan: EvaluationPlan,
        host: HostRunner,
        *,
        strategy: StrategySpec,
        storage: TrajectoryStorage,
        success: SuccessRule = CERTAIN,
    ) -> None:
        self._strategy = strategy
        self._storage = storage
        self._host = host
        self._places = asyncio.Semaphore(plan.workers)
        self._rule = success
        at = success.at
        self._success: Reward = (
            registry.build("rewards", "return")
            if at is None
            else registry.build("rewards", "success", {"threshold": at})
        )

    async def run(self, request: EpisodeRequest, eval_task: EvalTask) -> GradedEpisode:
        """As in ``EvalRunner``."""
        found = await stored_with_scores(self._storage, trajectory_id(request), self._strategy)
        trajectory, scores = found or (None, ())
        if trajectory is None or trajectory.stop is StopReason.UNFINISHED:
            async with self._places:
                trajectory = await self._host.run(request)
        if trajectory.failure is not None:
            return GradedEpisode(trajectory)
        score = await judge(self._success, trajectory)
        if isinstance(score, Score) and score.reward_version not in {each.reward_version for each in scores}:
            await self._storage.add_scores([score])
        if trajectory.evidence.get("unrewarded") is True:
            return GradedEpisode(trajectory)
        # After a timeout the last action has no observation: the task is not resolved, and the reward has no value.
        valid = isinstance(score, Score)
        resolved = valid and self._rule.holds(trajectory.episode_return, trajectory.stop)
        return _reported(trajectory, resolved, valid)


def folder_name(environment: str) -> str:
    """The name of an environment as a valid folder name: ``gymnasium__FrozenLake-v1``."""
    return _NO_NAME.sub("__", environment)


def indexed_tasks(environment: str, indices: range | tuple[int, ...], split: str) -> tuple[EvalTask, ...]:
    """A task for each index that the environment's ``reset`` takes. Ids are valid folder names."""
    name = folder_name(environment)
    tasks = (Task(id=f"{name}-{index}", environment=environment, data={"idx": index}, split=split) for index in indices)
    return tuple(EvalTask(task, {"idx": task.data["idx"], "environment": environment}) for task in tasks)


def row_tasks(environment: str, file: Path, split: str) -> tuple[EvalTask, ...]:
    """``tasks_of_rows`` of a file. Raises ``ConfigError``."""
    return tasks_of_rows(environment, tuple(read_rows(file)), split)


def tasks_of_rows(environment: str, rows: Sequence[JsonObject], split: str) -> tuple[EvalTask, ...]:
    """A task for each row; ``reset`` gets the row.

    A task has the name that its row gives, if no other row has it, else the row's number.
    """
    name = folder_name(environment)
    names = tuple(_name_of(row) for row in rows)
    held = Counter(names)
    eval_tasks = []
    for index, row in enumerate(rows):
        own = names[index] if names[index] and held[names[index]] == 1 else str(index)
        task = Task(id=f"{name}-{own}", environment=environment, data={"idx": index, "row": row}, split=split)
        eval_tasks.append(EvalTask(task, {"idx": index, "environment": environment, "row": row}))
    return tuple(eval_tasks)


def _name_of(row: JsonObject) -> str:
    given = next((row[key] for key in _ROW_NAMES if isinstance(row.get(key), str | int)), "")
    return _NO_NAME.sub("__", str(given))[:_LONGEST_NAME]


def _reported(trajectory: Trajectory, resolved: bool, valid: bool) -> GradedEpisode:
    """The episode with its return and success in ``test_result``, as for SWE-bench instances."""
    total = trajectory.episode_return
    result: JsonObject = {"reward": total, "report": {"resolved": resolved}}
    detail: JsonObject = {"resolved": resolved, "valid": valid}
    score = Score(trajectory_id=trajectory.id, reward=total, detail=detail, reward_version=_AS_RETURNED)
    evidence = {**trajectory.evidence, "test_result": result}
    return GradedEpisode(trajectory.model_copy(update={"evidence": evidence}), score)
