"""What rows say about a stored trajectory: its score, whether it was resolved, and its patch."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

from openhands_rl_plugin.core.judgements import VERDICT, newest_outcome
from openhands_rl_plugin.core.types import JsonObject, Score, Trajectory

RESOLVED_AT = 1.0
# Sums of step rewards such as 10 x 0.1 must not miss the threshold by a rounding error.
_ROUNDING = 1e-9


def score_of(trajectory: Trajectory, scores: Sequence[Score]) -> float | None:
    """The newest score's reward, verifiers' aside; else the return, if there is one; ``None`` after a failure."""
    if trajectory.failure is not None:
        return None
    newest = newest_outcome(scores)
    return newest.reward if newest is not None else trajectory.known_return


def resolved(trajectory: Trajectory, scores: Sequence[Score]) -> bool | None:
    """What a score by hand says; else the newest score or the grader's report; else whether the score reaches 1.0;
    else unknown."""
    report = _at(trajectory.evidence, "test_result", "report") or trajectory.evidence.get("report")
    newest = newest_outcome(scores)
    if newest is not None and newest.reward is not None and newest.reward_version == VERDICT:
        return newest.reward >= RESOLVED_AT - _ROUNDING
    candidates = [newest.detail.get("resolved") if newest is not None else None, trajectory.evidence.get("resolved")]
    candidates.append(report.get("resolved") if isinstance(report, dict) else None)
    for candidate in candidates:
        if isinstance(candidate, bool):
            return candidate
    score = score_of(trajectory, scores)
    return None if score is None else score >= RESOLVED_AT - _ROUNDING


def patch_of(trajectory: Trajectory) -> str | None:
    """The change that the agent made, as a diff; ``None`` when none was recorded, not even an empty one."""
    evidence = trajectory.evidence
    for patch in (evidence.get("git_patch"), _at(evidence, "test_result", "git_patch"), evidence.get("patch")):
        if isinstance(patch, str):
            return patch
    return None


def identity_columns(trajectory: Trajectory, scores: Sequence[Score]) -> JsonObject:
    """The columns that identify a row and judge it."""
    return {
        "trajectory_id": trajectory.id,
        "instance_id": trajectory.task.id,
        "run_id": trajectory.run_id,
        "model": trajectory.policy.served_name,
        "score": score_of(trajectory, scores),
        "resolved": resolved(trajectory, scores),
    }


def _at(evidence: JsonObject, outer: str, inner: str) -> JsonValue:
    found = evidence.get(outer)
    return found.get(inner) if isinstance(found, dict) else None
