"""What is said of a run beside its stages: how it was started, on what, and what its evaluations show of each stage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.machine import machine, versions
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.statistics import Estimate, paired_difference, wilson
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState, StageRecord

FACTS = "run.json"
EVALUATIONS = ("evaluate-base", "evaluate-warm-start", "evaluate-final")
"""The stages that measure held-out tasks, in their order."""
_MOST_SAMPLES = 3
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
        """Of a run's folder; ``None`` where a run has none. Raises ``StorageError`` for a damaged file."""
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
            base_model=plan.base_model,
            seed=plan.seed,
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


class HeldOut:
    """The episodes of a plan's evaluations. Each stage is read once; a finished one does not change."""

    def __init__(self, plan: LoopPlan, storage: TrajectoryStorage, reward_version: str) -> None:
        self._plan = plan
        self._storage = storage
        self._version = reward_version
        self._known: dict[str, dict[str, HeldOutEpisode]] = {}

    async def changes(self, state: LoopState) -> tuple[StageChange, ...]:
        """What each training stage changed, over the tasks with a valid episode before and after."""
        names = {"evaluate-warm-start": "After SFT", "evaluate-final": "After RL"}
        against = {"evaluate-base": state.start or "the base model", "evaluate-warm-start": "SFT"}
        found: list[StageChange] = []
        for before, after in itertools.pairwise(_measured(state)):
            first, later = await self.of(before), await self.of(after)
            if shared := sorted(first.keys() & later.keys()):
                pairs = [[float(side[task].success) for task in shared] for side in (first, later)]
                name = f"{names[after]} against {against[before]}"
                found.append(StageChange(name=name, before=before, after=after, difference=paired_difference(*pairs)))
        return tuple(found)

    async def samples(self, state: LoopState) -> tuple[SamplePair, ...]:
        """The tasks with the largest gain in reward between the first and the last evaluation, the largest first."""
        stages = _measured(state)
        if not stages:
            return ()
        first, last = await self.of(stages[0]), await self.of(stages[-1])
        shared = sorted(first.keys() & last.keys(), key=lambda task: (first[task].reward - last[task].reward, task))
        pairs = [SamplePair(task=task, before=first[task].id, after=last[task].id) for task in shared]
        return tuple(pairs[:_MOST_SAMPLES])

    async def of(self, stage: str) -> dict[str, HeldOutEpisode]:
        """The valid episodes of a stage, by task."""
        if stage not in self._known:
            where = TrajectoryFilter(run_id=f"{self._plan.run_id}/{stage}", failed=False)
            found: dict[str, HeldOutEpisode] = {}
            async for trajectory, scores in self._storage.find(where):
                for score in scores:
                    if score.reward_version == self._version and score.reward is not None:
                        success = self._plan.succeeded(trajectory, score.reward)
                        found[trajectory.task.id] = HeldOutEpisode(
                            id=trajectory.id, reward=score.reward, success=success
                        )
            self._known[stage] = found
        return self._known[stage]


class HeldOutEpisode(Frozen):
    """An episode of an evaluation."""

    id: str
    reward: float
    success: bool


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


def _measured(state: LoopState) -> list[str]:
    return [name for name in EVALUATIONS if state.record(name) is not None]
