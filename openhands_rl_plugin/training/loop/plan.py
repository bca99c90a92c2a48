"""The plan of a run, its persistent state, and facts that are not in its stages, such as evaluations' results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError

from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.judgements import SuccessRule
from openhands_rl_plugin.core.machine import machine, versions
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.statistics import Estimate, wilson
from openhands_rl_plugin.core.types import Frozen, StopReason, Task, Trajectory

_SUCCESS = 0.999
"""Rewards are sums of floats."""


class LoopPlan(Frozen):
    """A whole run, by its ``settings``.

    ``success``: the criterion on the return; without it a reward of 1 is a success.
    """

    settings: RLSettings
    run_id: str
    demonstrations: tuple[Task, ...]
    training: tuple[Task, ...]
    held_out: tuple[Task, ...]
    warm_start: TrainingSettings
    success: SuccessRule | None = None

    def succeeded(self, trajectory: Trajectory, reward: float) -> bool:
        """Whether an episode with this reward is a success."""
        return self.is_success(trajectory.known_return, trajectory.stop, reward)

    def is_success(self, total: float | None, stop: StopReason, reward: float) -> bool:
        """Whether an episode with this return (``None``: unknown), end and reward is one."""
        if self.success is None or total is None:
            return reward >= _SUCCESS
        return self.success.holds(total, stop)

    @property
    def batch_size(self) -> int:
        """Number of groups, each of another task, in the batch of an iteration."""
        return min(self.settings.loop.tasks_per_iteration, len(self.training))


def iteration_name(index: int) -> str:
    """``2`` -> ``"iteration-002"``."""
    return f"iteration-{index:03d}"


class StageRecord(Frozen):
    """A finished stage: the adapter in use at its end, its metrics, and its Unix times in seconds.

    ``groups``: the groups that it consumed.
    """

    name: str
    adapter: str | None
    metrics: dict[str, float]
    started: float
    finished: float
    groups: tuple[int, ...] = ()


class ChosenBatch(Frozen):
    """The batch of a stage in progress: ``groups`` by number, their ``trajectories`` by id.

    ``dropped`` groups were too stale and count as consumed; ``stale`` is the number of episodes left out of the others.
    """

    stage: str
    groups: tuple[int, ...]
    trajectories: tuple[str, ...]
    dropped: tuple[int, ...] = ()
    stale: int = 0


class LoopState(Frozen):
    """The finished stages of a run, in order, and the batch of the stage in progress, once it is chosen.

    ``start``: the adapter that the run started from, if it was not the base model alone. ``made``: the versions that
    the run wrote, also in stages that did not end.
    """

    start: str | None = None
    records: tuple[StageRecord, ...] = ()
    batch: ChosenBatch | None = None
    made: tuple[str, ...] = ()

    @property
    def adapter(self) -> str | None:
        """The adapter that the next stage starts from."""
        return self.records[-1].adapter if self.records else self.start

    def record(self, name: str) -> StageRecord | None:
        """The record of a stage, if it is finished."""
        return next((record for record in self.records if record.name == name), None)

    def with_record(self, record: StageRecord) -> Self:
        """This state and one more finished stage."""
        return self.model_copy(update={"records": (*self.records, record), "batch": None})

    def with_batch(self, batch: ChosenBatch) -> Self:
        """This state in the middle of a stage."""
        return self.model_copy(update={"batch": batch})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a state file; a missing one is the start of a run. Raises ``StorageError`` for a damaged one."""
        if not path.exists():
            return cls()
        try:
            return cls.model_validate_json(path.read_text())
        except ValidationError as error:
            raise StorageError(f"{path} is not the state of a run: move it away to start a new run") from error

    def save(self, path: Path) -> None:
        """Replace the state file atomically and durably. Raises ``StorageError``."""
        write_file(path, self.model_dump_json(indent=1), parents=True)


def success_metrics(
    episodes: Sequence[Trajectory], rewards: Sequence[float | None], succeeded: Callable[[Trajectory, float], bool]
) -> dict[str, float]:
    """Counts and means over the episodes that have a reward; ``failed`` ones and ``unscored`` ones (no failure, and no
    reward) are counted separately, never as zeros; where there is no reward there is no mean."""
    valid = [reward for reward in rewards if reward is not None]
    judged = zip(episodes, rewards, strict=True)
    successes = sum(succeeded(each, reward) for each, reward in judged if reward is not None)
    failed = sum(trajectory.failure is not None for trajectory in episodes)
    turns = [sum(1 for _ in trajectory.sampled()) for trajectory in episodes]
    return {
        "episodes": float(len(episodes)),
        "failed": float(failed),
        "unscored": float(len(episodes) - len(valid) - failed),
        "successes": float(successes),
        **({"success": successes / len(valid), "reward": sum(valid) / len(valid)} if valid else {}),
        "turns": sum(turns) / len(turns) if turns else 0.0,
    }


def is_too_stale(trajectory: Trajectory, lineage: Sequence[str], most: int) -> bool:
    """Whether a token was sampled more than ``most`` versions ago, or by weights that are not of ``lineage``.

    ``lineage``: names that training went on from, in order, the base model's first. The number in a version's name is
    not enough: a killed stage may have left a version from which no training continued.
    """
    fresh = [*dict.fromkeys(lineage)][-most - 1 :]
    policies = (node.policy or trajectory.policy for node in trajectory.nodes if node.sampled)
    return any(policy.served_name not in fresh for policy in policies)


FACTS = "run.json"
EVALUATIONS = ("evaluate-base", "evaluate-warm-start", "evaluate-final")
"""The stages that measure held-out tasks, in their order."""
_LONGEST_COMMAND = 2000


class StageChange(Frozen):
    """``name``: "After RL against SFT". ``difference``: of the success rates on the tasks that both stages measured."""

    name: str
    before: str
    after: str
    difference: Estimate

    def sentence(self) -> str:
        """``After RL against SFT: +0.21 in success (95% interval +0.10 to +0.32, 100 tasks in both evaluations)``."""
        change = self.difference
        return (
            f"{self.name}: {change.mean:+.2f} in success (95% interval {change.low:+.2f} to {change.high:+.2f}, "
            f"{change.n} tasks in both evaluations, {self.before} and {self.after})"
        )


class SamplePair(Frozen):
    """A task, and the ids of its episodes in the first and the last evaluation."""

    task: str
    before: str
    after: str


class RunFacts(Frozen):
    """``began``: Unix seconds. ``stages``: of the whole run. ``command``: as it was typed, without secrets."""

    run_id: str
    title: str = ""
    base_model: str = ""
    seed: int = 0
    stages: int = 0
    command: str = ""
    machine: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    began: float = 0.0
    changes: tuple[StageChange, ...] = ()
    samples: tuple[SamplePair, ...] = ()

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        """Load the facts of a run's folder; ``None`` if there are none. Raises ``StorageError`` for a damaged file."""
        try:
            return cls.model_validate_json((directory / FACTS).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise StorageError(f"{directory / FACTS} cannot be read: move it away; the run writes another") from error

    @classmethod
    def begin(cls, directory: Path, plan: LoopPlan, *, title: str, stages: int, command: str = "") -> Self:
        """Save what is known before the first stage; a resumed run keeps when it began and what it has measured."""
        before = cls.load(directory)
        kept = {} if before is None else {"began": before.began, "changes": before.changes, "samples": before.samples}
        facts = cls(
            run_id=plan.run_id,
            title=title,
            base_model=plan.settings.serving.model,
            seed=plan.settings.sampling.seed,
            stages=stages,
            command=redact_text(command)[:_LONGEST_COMMAND],
            machine=machine(),
            versions=versions(),
            began=time.time(),
        ).model_copy(update=kept)
        facts.save(directory)
        return facts

    def save(self, directory: Path) -> None:
        """Replace the file. Raises ``StorageError``."""
        write_file(directory / FACTS, self.model_dump_json(indent=1), parents=True)


def success_of(record: StageRecord) -> Estimate | None:
    """The success of a stage with its interval. Failed and unscored episodes do not count; ``None`` without others."""
    metrics = record.metrics
    if "success" not in metrics or "successes" not in metrics:
        return None
    judged = int(metrics.get("episodes", 0.0) - metrics.get("failed", 0.0) - metrics.get("unscored", 0.0))
    return wilson(int(metrics["successes"]), judged) if judged > 0 else None


def evaluations(state: LoopState) -> Sequence[StageRecord]:
    """The finished evaluations on held-out tasks."""
    return [record for record in state.records if record.name.startswith("evaluate-")]
