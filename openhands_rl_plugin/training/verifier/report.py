"""Evaluation of a verifier on held-out tasks: ranking (AUC), calibration (ECE, Brier score) and best-of-k selection.

Pure functions over scores and outcomes; no torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from openhands_rl_plugin.config.rl import VerifierSettings
from openhands_rl_plugin.core.statistics import Estimate, best_at_k, over_tasks, pass_at_k
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.training.verifier.card import Calibration, sigmoid

REPORT_FILE = "verifier_report.json"
BINS = 10  # usual for reliability diagrams; more would be nearly empty with few held-out episodes
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


class Bin(Frozen):
    """The episodes with a score in [low, high): their number, mean score and success rate."""

    low: float
    high: float
    count: int
    score: float
    success: float


class SelectionRates(Frozen):
    """Success rates over the tasks with at least ``k`` attempts: of a random one, the best-scored of k, any of k."""

    k: int
    pass_at_k: Estimate
    best_at_k: Estimate
    mean: Estimate


class VerifierReport(Frozen):
    """Metrics on held-out tasks; ``None`` where one class is missing.

    ``auc``: the chance that a success is scored higher than a failure, with a 95% interval by bootstrap over tasks.
    ``ece``: mean distance between score and success over the bins; ``brier``: mean squared error. The ``raw`` ones are
    before calibration; the others are out of fold: each half of the tasks with what was fitted on the other half.
    """

    tasks: int
    episodes: int
    successes: int
    auc: Estimate | None
    brier: float
    ece: float
    raw_brier: float
    raw_ece: float
    label_mass: float
    calibration: Calibration
    bins: tuple[Bin, ...]
    selection: tuple[SelectionRates, ...]

    def as_floats(self) -> dict[str, float]:
        """For an adapter's manifest."""
        found = {"episodes": self.episodes, "tasks": self.tasks, "successes": self.successes, "brier": self.brier}
        auc = {"auc": self.auc.mean} if self.auc is not None else {}
        return {f"held_out_{name}": float(value) for name, value in {**found, "ece": self.ece, **auc}.items()}


def report_of(judged: Sequence[ScoredEpisode], settings: VerifierSettings) -> VerifierReport:
    """The metrics of one verifier on at least one held-out episode."""
    outcomes = [each.success for each in judged]
    raw = [sigmoid(each.margin) for each in judged]
    calibration = fitted(judged, settings)
    scores = _out_of_fold(judged, settings)
    bins = reliability(scores, outcomes)
    ranked = [calibration.probability(each.margin) for each in judged]
    return VerifierReport(
        tasks=len({each.task for each in judged}),
        episodes=len(judged),
        successes=sum(outcomes),
        auc=_auc_over_tasks(judged),
        brier=brier(scores, outcomes),
        ece=calibration_error(bins),
        raw_brier=brier(raw, outcomes),
        raw_ece=calibration_error(reliability(raw, outcomes)),
        label_mass=sum(each.mass for each in judged) / len(judged),
        calibration=calibration,
        bins=bins,
        selection=tuple(_selections(judged, ranked)),
    )


def auc(scores: Sequence[float], outcomes: Sequence[bool]) -> float | None:
    """The probability that a random success is scored higher than a random failure; a tie counts half.

    ``None`` when there are no successes or no failures.
    """
    positives = sum(outcomes)
    negatives = len(outcomes) - positives
    if not positives or not negatives:
        return None
    order = sorted(range(len(scores)), key=scores.__getitem__)
    total, at = 0.0, 0
    while at < len(order):
        stop = at
        while stop < len(order) and scores[order[stop]] == scores[order[at]]:
            stop += 1
        # Ranks start at 1; equal scores have the mean of their ranks.
        total += sum(outcomes[index] for index in order[at:stop]) * (at + stop + 1) / 2
        at = stop
    return (total - positives * (positives + 1) / 2) / (positives * negatives)


def brier(scores: Sequence[float], outcomes: Sequence[bool]) -> float:
    """Mean squared difference between score and outcome."""
    return sum((score - outcome) ** 2 for score, outcome in zip(scores, outcomes, strict=True)) / len(scores)


def reliability(scores: Sequence[float], outcomes: Sequence[bool]) -> tuple[Bin, ...]:
    """The scores in bins of equal width; empty bins are left out."""
    members: dict[int, list[int]] = {}
    for at, score in enumerate(scores):
        members.setdefault(min(int(score * BINS), BINS - 1), []).append(at)
    return tuple(
        Bin(
            low=number / BINS,
            high=(number + 1) / BINS,
            count=len(inside),
            score=sum(scores[at] for at in inside) / len(inside),
            success=sum(outcomes[at] for at in inside) / len(inside),
        )
        for number, inside in sorted(members.items())
    )


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error (Guo et al. 2017, arXiv 1706.04599) of P(YES)."""
    total = sum(one.count for one in bins)
    return sum(one.count * abs(one.score - one.success) for one in bins) / total


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
        grad_s, grad_b, curve_s, curve_b, cross = _RIDGE * s, _RIDGE * offset, _RIDGE, _RIDGE, 0.0
        for each in judged:
            p = sigmoid(slope * each.margin + offset)
            error, weight, x = p - each.success, p * (1 - p), slope * each.margin
            grad_s, grad_b = grad_s + error * x / len(judged), grad_b + error / len(judged)
            curve_s, curve_b = curve_s + weight * x * x / len(judged), curve_b + weight / len(judged)
            cross += weight * x / len(judged)
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
