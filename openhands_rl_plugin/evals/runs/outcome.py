"""One attempt at one task: the graded episode, and its outcome, the row of every report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.types import FailureKind, Frozen, JsonObject, Score, Task, Trajectory
from openhands_rl_plugin.evals.swe.types import UNKNOWN, Instance, PatchVerdict, VerdictKind


class GradedEpisode(NamedTuple):
    """An episode with its score. ``trajectory.evidence`` has ``test_result``; ``verdict`` is for SWE-bench instances.

    Without a score the outcome of the attempt is unknown.
    """

    trajectory: Trajectory
    score: Score | None = None
    verdict: PatchVerdict | None = None


class EvalTask(NamedTuple):
    """A task of a suite with its row of the dataset."""

    task: Task
    row: JsonObject
    instance: Instance | None = None


class Outcome(Frozen, extra="ignore"):
    """One attempt. ``cost`` is in US dollars, ``None`` where the model has no known price; times in seconds.

    ``turns`` counts executed completions. ``flags``: guard rules that matched the patch or its run. Other
    fields, as earlier versions wrote, are not read.
    """

    instance_id: str
    run: int = 0
    kind: VerdictKind
    reward: float | None = None
    reason: str = ""
    stop: str = ""
    flags: tuple[str, ...] = ()
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    seconds: float = 0.0
    grading_seconds: float = 0.0
    trajectory_id: str = ""

    @property
    def resolved(self) -> bool | None:
        """Whether the instance was resolved; ``None`` when that is unknown."""
        return None if self.kind in UNKNOWN else self.kind is VerdictKind.RESOLVED


def outcome_of(graded: GradedEpisode, run: int) -> Outcome:
    """The outcome of a graded attempt."""
    trajectory, verdict = graded.trajectory, graded.verdict
    usage, times = trajectory.usage, trajectory.times
    return Outcome(
        instance_id=trajectory.task.id,
        run=run,
        kind=_kind(graded),
        reward=graded.score.reward if graded.score else None,
        reason=_reason(graded),
        stop=trajectory.stop.value,
        flags=verdict.flagged if verdict else (),
        turns=sum(1 for _ in trajectory.sampled()),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        cost=cost_of(trajectory.policy.served_name, usage.prompt_tokens, usage.completion_tokens),
        seconds=max(0.0, times.finished - times.started),
        grading_seconds=verdict.seconds if verdict else 0.0,
        trajectory_id=trajectory.id,
    )


@cache
def _prices() -> dict[str, dict[str, float]]:
    """The price list that comes with LiteLLM; empty without it."""
    found = find_spec("litellm")
    if found is None or found.origin is None:
        return {}
    file = Path(found.origin).with_name("model_prices_and_context_window_backup.json")
    return json.loads(file.read_text(encoding="utf-8"))


def cost_of(model: str, prompt_tokens: int, completion_tokens: int) -> float | None:
    """US dollars, by LiteLLM's price list; ``None`` for a model that is not in it."""
    price = _prices().get(model, {})
    if "input_cost_per_token" not in price:
        return None
    return prompt_tokens * price["input_cost_per_token"] + completion_tokens * price.get("output_cost_per_token", 0)


def kind_of_failure(trajectory: Trajectory) -> VerdictKind | None:
    """The kind of a failed episode; ``None`` for a valid one."""
    if trajectory.failure is None:
        return None
    infrastructure = trajectory.failure.kind is FailureKind.INFRASTRUCTURE
    return VerdictKind.INFRASTRUCTURE if infrastructure else VerdictKind.FAILED


def count_kinds(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """The number of outcomes of every kind, zeros included."""
    found = [outcome.kind for outcome in outcomes]
    return {kind.value: found.count(kind) for kind in VerdictKind}


def _kind(graded: GradedEpisode) -> VerdictKind:
    if (failed := kind_of_failure(graded.trajectory)) is not None:
        return failed
    if graded.verdict is not None:
        return graded.verdict.kind
    if graded.score is None or graded.score.reward is None:
        return VerdictKind.UNGRADED
    return VerdictKind.RESOLVED if graded.score.detail.get("resolved") is True else VerdictKind.UNRESOLVED


def _reason(graded: GradedEpisode) -> str:
    if graded.trajectory.failure is not None:
        return graded.trajectory.failure.message
    return graded.verdict.reason if graded.verdict else ""
