"""A trained verifier's files: its card, which is all that scoring needs to match training, and its report. No torch.

The report is an evaluation on held-out tasks: ranking (AUC), calibration (Brier score) and best-of-k selection, by pure
functions over scores and outcomes.
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import ConfigDict, Field

from openhands_rl_plugin.config.rl import VerifierSettings
from openhands_rl_plugin.core.errors import ConfigError, TrainingError, describe
from openhands_rl_plugin.core.statistics import Estimate, best_at_k, over_tasks, pass_at_k
from openhands_rl_plugin.core.types import Adapter, Frozen

CARD_FILE = "verifier.json"


class VerifierOutput(NamedTuple):
    """``margin``: logit(YES) - logit(NO) in nats. ``mass``: p(YES) + p(NO) among all tokens, 1.0 at most."""

    margin: float
    mass: float


class Calibration(Frozen):
    """``P(YES) = sigmoid(slope * margin + offset)``, where ``margin`` is logit(YES) - logit(NO) in nats.

    The slope is the inverse of a temperature; the offset corrects for another share of successes than in training.
    """

    slope: float = Field(default=1.0, gt=0)
    offset: float = 0.0

    def probability(self, margin: float) -> float:
        """P(YES). With slope 1 and offset 0 it is p(YES) / (p(YES) + p(NO))."""
        return sigmoid(self.slope * margin + self.offset)


class VerifierCard(Frozen):
    """``CARD_FILE`` of an adapter directory.

    ``model``: the base model's directory. ``sha256``: of the adapter's weights file. ``max_length``: tokens of the
    longest prompt with its label. ``yes`` and ``no``: the token ids that are trained and scored. ``trained_on``: the
    digests of all tasks in the training data of this and earlier versions; missing in cards of earlier releases.
    """

    model_config = ConfigDict(extra="ignore")  # other releases write other keys

    model: str
    sha256: str
    max_length: int = Field(ge=1)
    yes: int = Field(ge=0)
    no: int = Field(ge=0)
    calibration: Calibration = Calibration()
    trained_on: tuple[str, ...] | None = None

    @property
    def version(self) -> str:
        """The reward version of its scores; it names everything that changes them."""
        calibrated = self.calibration
        suffix = "" if calibrated == Calibration() else f"/{calibrated.slope:.6g},{calibrated.offset:.6g}"
        return f"{VERSION_PREFIX}{self.sha256[:16]}/{self.max_length}{suffix}"

    def save(self, directory: Path) -> None:
        """Write it into an adapter directory."""
        (directory / CARD_FILE).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read it from an adapter directory. Raises ``ConfigError`` when there is none or it is damaged."""
        path = directory / CARD_FILE
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{directory} is no verifier: {describe(error)}; give one that `openhands-rl train --verifier` made"
            ) from error


VERSION_PREFIX = "verifier-1@"
"""The prefix of all verifiers' reward versions: their scores must not be used as labels."""


def task_digest(task: str) -> str:
    """A short digest of a task. In a collision, the only effect is that the second task is not held out."""
    return hashlib.sha256(task.encode()).hexdigest()[:8]


def tasks_trained_on(parent: Adapter | None) -> frozenset[str]:
    """The digests of the tasks in the training data of a verifier and its earlier versions.

    Raises ``TrainingError`` where ``parent`` is no verifier, or its tasks are unknown.
    """
    if parent is None:
        return frozenset()
    if not (Path(parent.path) / CARD_FILE).exists():
        raise TrainingError(f"{parent.name} is no verifier; choose another --adapter name, or --from base")
    if (marks := VerifierCard.load(Path(parent.path)).trained_on) is None:
        raise TrainingError(f"{parent.name} does not say what tasks it was trained on: start over with --from base")
    return frozenset(marks)


def sigmoid(x: float) -> float:
    """``1 / (1 + exp(-x))`` without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


REPORT_FILE = "verifier_report.json"
_STEPS = 100
_RIDGE = 1e-3
_RESAMPLES = 500  # bootstrap: enough for the quantiles of a 95% interval


@dataclass(frozen=True)
class ScoredEpisode:
    """``margin``: logit(YES) - logit(NO) of an episode, in nats. ``mass``: p(YES) + p(NO) among all tokens."""

    task: str
    margin: float
    success: bool
    mass: float = 1.0


class SelectionRates(Frozen):
    """Success rates over the tasks with at least ``k`` attempts: of a random one, the best-scored of k, any of k."""

    k: int
    pass_at_k: Estimate
    best_at_k: Estimate
    mean: Estimate


class VerifierReport(Frozen):
    """Metrics on held-out tasks; ``None`` where one class is missing.

    ``auc``: the chance that a success is scored higher than a failure, with a 95% interval by bootstrap over tasks.
    ``raw_brier``: mean squared error of the scores before calibration; ``brier``: after it, out of fold, each half of
    the tasks with what was fitted on the other half.
    """

    tasks: int
    episodes: int
    successes: int
    auc: Estimate | None
    brier: float
    raw_brier: float
    label_mass: float
    calibration: Calibration
    selection: tuple[SelectionRates, ...]

    def as_floats(self) -> dict[str, float]:
        """The figures as floats, for an adapter's manifest."""
        found = {"episodes": self.episodes, "tasks": self.tasks, "successes": self.successes, "brier": self.brier}
        auc = {"auc": self.auc.mean} if self.auc is not None and self.auc.mean is not None else {}
        return {f"held_out_{name}": float(value) for name, value in {**found, **auc}.items()}


def report_of(judged: Sequence[ScoredEpisode], settings: VerifierSettings) -> VerifierReport:
    """The metrics of one verifier on at least one held-out episode."""
    outcomes = [each.success for each in judged]
    raw = [sigmoid(each.margin) for each in judged]
    calibration = fitted(judged, settings)
    scores = _out_of_fold(judged, settings)
    ranked = [calibration.probability(each.margin) for each in judged]
    return VerifierReport(
        tasks=len({each.task for each in judged}),
        episodes=len(judged),
        successes=sum(outcomes),
        auc=_auc_over_tasks(judged),
        brier=brier(scores, outcomes),
        raw_brier=brier(raw, outcomes),
        label_mass=sum(each.mass for each in judged) / len(judged),
        calibration=calibration,
        selection=tuple(_selections(judged, ranked)),
    )


def auc(scores: Sequence[float], outcomes: Sequence[bool]) -> float | None:
    """The probability that a random success is scored higher than a random failure; a tie counts half.

    ``None`` when there are no successes or no failures.
    """
    pairs = [*zip(scores, outcomes, strict=True)]
    good, bad = [score for score, success in pairs if success], sorted(score for score, success in pairs if not success)
    if not good or not bad:
        return None
    return sum(bisect_left(bad, score) + bisect_right(bad, score) for score in good) / (2 * len(good) * len(bad))


def brier(scores: Sequence[float], outcomes: Sequence[bool]) -> float:
    """Mean squared difference between score and outcome."""
    return sum((score - outcome) ** 2 for score, outcome in zip(scores, outcomes, strict=True)) / len(scores)


LEAST_CALIBRATED = 50
"""Held-out episodes below which two parameters are noise."""


def fitted(judged: Sequence[ScoredEpisode], settings: VerifierSettings, least: int = LEAST_CALIBRATED) -> Calibration:
    """The maximum-likelihood calibration: of the slope ("temperature"), or of slope and offset ("platt").

    Temperature scaling is by Guo et al. 2017 (arXiv 1706.04599), Platt scaling by Platt 1999. Without both classes, and
    with fewer than ``least`` episodes, it is the identity: nothing is calibrated. A small ridge penalty
    keeps the parameters finite where the classes are separable.
    """
    few = len(judged) < least or len({each.success for each in judged}) < 2
    if settings.calibration == "none" or few:
        return Calibration()
    # The slope is exp(s), which is positive, so the order of the scores does not change.
    s, offset = 0.0, 0.0
    free = settings.calibration == "platt"
    for _ in range(_STEPS):
        slope = math.exp(s)
        sums = [_RIDGE * s, _RIDGE * offset, _RIDGE, _RIDGE, 0.0]  # gradient, curvature, and the mixed derivative
        for each in judged:
            p, x = sigmoid(slope * each.margin + offset), slope * each.margin
            error, weight = p - each.success, p * (1 - p)
            for at, part in enumerate((error * x, error, weight * x * x, weight, weight * x)):
                sums[at] += part / len(judged)
        grad_s, grad_b, curve_s, curve_b, cross = sums
        determinant = curve_s * curve_b - cross * cross
        step_s = (curve_b * grad_s - cross * grad_b) / determinant if free else grad_s / curve_s
        step_b = (curve_s * grad_b - cross * grad_s) / determinant if free else 0.0
        s, offset = s - max(-1.0, min(1.0, step_s)), offset - max(-1.0, min(1.0, step_b))
        if abs(step_s) + abs(step_b) < 1e-9:
            break
    return Calibration(slope=math.exp(s), offset=offset)


def _out_of_fold(judged: Sequence[ScoredEpisode], settings: VerifierSettings) -> list[float]:
    tasks = sorted({each.task for each in judged})
    random.Random(0).shuffle(tasks)
    first = set(tasks[: len(tasks) // 2])
    folds = [[each for each in judged if (each.task in first) == side] for side in (False, True)]
    least = 2 if len(judged) >= LEAST_CALIBRATED else LEAST_CALIBRATED
    for_first, for_second = (fitted(folds[side], settings, least) for side in (False, True))
    return [(for_first if each.task in first else for_second).probability(each.margin) for each in judged]


def _auc_over_tasks(judged: Sequence[ScoredEpisode]) -> Estimate | None:
    mean = auc([each.margin for each in judged], [each.success for each in judged])
    if mean is None:
        return None
    groups = list(_by_task(judged).values())
    generator, found = random.Random(0), []
    for _ in range(_RESAMPLES):
        drawn = [judged[at] for group in generator.choices(groups, k=len(groups)) for at in group]
        value = auc([each.margin for each in drawn], [each.success for each in drawn])
        if value is not None:
            found.append(value)
    found = sorted(found) or [mean]
    low, high = found[int(0.025 * len(found))], found[max(0, int(0.975 * len(found)) - 1)]
    return Estimate(mean=mean, low=min(low, mean), high=max(high, mean), n=len(groups))


def _selections(judged: Sequence[ScoredEpisode], scores: Sequence[float]) -> list[SelectionRates]:
    groups = [group for group in _by_task(judged).values() if len(group) > 1]
    found, k = [], 2
    while tasks := [group for group in groups if len(group) >= k]:
        outcomes = [[judged[at].success for at in group] for group in tasks]
        ranked = [[scores[at] for at in group] for group in tasks]
        found.append(
            SelectionRates(
                k=k,
                pass_at_k=over_tasks([pass_at_k(len(each), sum(each), k) for each in outcomes]),
                best_at_k=over_tasks([best_at_k(s, o, k) for s, o in zip(ranked, outcomes, strict=True)]),
                mean=over_tasks([sum(each) / len(each) for each in outcomes]),
            )
        )
        k *= 2
    return found


def _by_task(judged: Sequence[ScoredEpisode]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for at, each in enumerate(judged):
        groups.setdefault(each.task, []).append(at)
    return groups
