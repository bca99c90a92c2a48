"""Rewards over trajectories, one judgement or many together; ``rescoring`` judges what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.records import Label, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, FailureKind, Frozen, Score, Trajectory


@runtime_checkable
class JudgesLabels(Protocol):
    """A reward that follows from what people said of the episode. A capability, not a flag.

    Its stored scores are those of the labels when somebody last asked for them (``rescore``).
    """

    def from_labels(self, trajectory_id: str, labels: Sequence[Label]) -> Score | None:
        """The score that follows from an episode's ``labels``, without a reward where they contradict each other;
        ``None`` where nobody said anything that counts."""
        ...


def workspace_command(reward: Reward) -> WorkspaceCommand | None:
    """The command whose result a reward needs, where it has one.

    The host runs it in the workspace when the episode ends, and puts a ``CommandEvidence`` into the evidence, as
    ``CHECKED``.
    """
    return getattr(reward, "workspace_command", None)


def refuse_without_workspace(reward: Reward, where: str) -> None:
    """Raise ``ConfigError`` for a reward that needs a workspace ``where`` there is none."""
    if (asked := workspace_command(reward)) is not None:
        raise ConfigError(
            f"[rl.reward]: `{asked.command}` judges a workspace at the end of an episode, and "
            f"{where}: choose another reward, such as return or recorded"
        )


def refuse_labels(reward: Reward, where: str) -> None:
    """Raise ``ConfigError`` for a reward that nobody can have given ``where`` it is asked for."""
    if isinstance(reward, JudgesLabels):
        raise ConfigError(
            f"[rl.reward]: {reward.version} is what people labelled, and {where}: choose another reward, and train on "
            "labels with `openhands-rl train STORE --reward human`"
        )


class ScoreReport(Frozen):
    """What a scoring pass did. ``unscored`` holds (trajectory id, reason); those stay without a score.

    ``withdrawn``: scores that no longer follow from the labels, and count no more.
    """

    scored: int = 0
    already_scored: int = 0
    withdrawn: int = 0
    unscored: tuple[tuple[str, Failure], ...] = ()


def known_score(reward: Reward, trajectory: Trajectory, scores: Sequence[Score]) -> Score | None:
    """What is known of an episode without judging it: from the record, else the newest score of this version.

    A reward that may follow from the scores of others has ``from_record``. What follows is read each time and never
    stored, so that a later verdict counts.
    """
    from_record = getattr(reward, "from_record", None)
    if from_record is not None and (known := from_record(trajectory, scores)) is not None:
        return known
    return next((score for score in reversed(scores) if score.reward_version == reward.version), None)


async def judge(reward: Reward, trajectory: Trajectory) -> Score | Failure:
    """One judgement; a grader that cannot judge yields its failure, not a zero."""
    if trajectory.failure is not None:
        return trajectory.failure
    try:
        with boundary(FailureKind.GRADER, f"reward {reward.version}"):
            return await reward(trajectory)
    except CaughtFailure as caught:
        return caught.failure


async def judge_all(reward: Reward, trajectories: Sequence[Trajectory]) -> list[Score | Failure]:
    """One judgement of each, in order; together where the reward can (``judge_all``)."""
    if (together := getattr(reward, "judge_all", None)) is not None:
        return await together(trajectories)
    return [await judge(reward, trajectory) for trajectory in trajectories]
