"""Rewards over stored trajectories: offline, re-runnable, never overwriting what was judged before."""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.errors import CaughtFailure, boundary
from openhands_rl_plugin.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.records import TrajectoryFilter
from openhands_rl_plugin.types import Failure, FailureKind, Frozen, Score, Trajectory


class ScoreReport(Frozen):
    """What a scoring pass did. ``unscored`` holds (trajectory id, reason); those stay without a score."""

    scored: int = 0
    already_scored: int = 0
    unscored: tuple[tuple[str, Failure], ...] = ()


async def score_stored(
    storage: TrajectoryStorage, reward: Reward, where: TrajectoryFilter | None = None
) -> ScoreReport:
    """Judge every matching trajectory that has no score of ``reward.version`` yet, and append the scores."""
    scores: list[Score] = []
    unscored: list[tuple[str, Failure]] = []
    already = 0
    async for trajectory, judged in storage.find(where):
        if any(score.reward_version == reward.version for score in judged):
            already += 1
            continue
        outcome = await judge(reward, trajectory)
        if isinstance(outcome, Score):
            scores.append(outcome)
        else:
            unscored.append((trajectory.id, outcome))
    await storage.add_scores(scores)
    return ScoreReport(scored=len(scores), already_scored=already, unscored=tuple(unscored))


async def judge(reward: Reward, trajectory: Trajectory) -> Score | Failure:
    """One judgement; a grader that cannot judge yields its failure, not a zero."""
    if trajectory.failure is not None:
        return trajectory.failure
    try:
        with boundary(FailureKind.GRADER, f"reward {reward.version}"):
            return await reward(trajectory)
    except CaughtFailure as caught:
        return caught.failure


async def scored_rewards(reward: Reward, trajectories: Sequence[Trajectory]) -> list[float | None]:
    """The reward of each trajectory, ``None`` where there is none, in the given order."""
    outcomes = [await judge(reward, trajectory) for trajectory in trajectories]
    return [outcome.reward if isinstance(outcome, Score) else None for outcome in outcomes]
