"""The facts of a run beside its stages: how it was started, on what, and what its evaluations show of each stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.machine import machine, versions
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.statistics import Estimate, wilson
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState, StageRecord

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
