"""Rewards over trajectories, one judgement or many together; ``rescoring`` judges what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.records import CommandEvidence, Label, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, FailureKind, Frozen, Score, Trajectory


@runtime_checkable
class BatchReward(Protocol):
    """A reward that is quicker with many episodes at a time. A capability, not a flag."""

    async def judge_all(self, trajectories: Sequence[Trajectory]) -> list[Score | Failure]:
        """One outcome an episode, in order."""
        ...


@runtime_checkable
class RecordedJudge(Protocol):
    """A reward that may follow from what others said of the episode. A capability, not a flag.

    What follows is read each time and never stored, so that a later verdict counts.
    """

    def from_record(self, trajectory: Trajectory, scores: Sequence[Score]) -> Score | None:
        """The score that follows from ``scores`` (oldest first); ``None`` where the reward has to judge itself."""
        ...


@runtime_checkable
class JudgesLabels(Protocol):
    """A reward that follows from what people said of the episode. A capability, not a flag.

    Its stored scores are those of the labels when somebody last asked for them (``rescore``).
    """

    def from_labels(self, trajectory_id: str, labels: Sequence[Label]) -> Score | None:
        """The score that follows from an episode's ``labels``, without a reward where they contradict each other;
        ``None`` where nobody said anything that counts."""
        ...


@runtime_checkable
class JudgesWorkspace(Protocol):
    """A reward that needs the result of a command in the episode's workspace. A capability, not a flag.

    The host runs the command when the episode ends and puts a ``CommandEvidence`` into the evidence, as ``CHECKED``.
    """

    @property
    def workspace_command(self) -> WorkspaceCommand:
        """What to run."""
        ...


@runtime_checkable
class RunsCommands(Protocol):
    """An environment with a workspace, in which a command can be run beside the agent's. A capability, not a flag."""

    async def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Run it over the workspace as it stands, in a fresh sandbox."""
        ...


def refuse_without_workspace(reward: Reward, where: str) -> None:
    """Raise ``ConfigError`` for a reward that needs a workspace ``where`` there is none."""
    if isinstance(reward, JudgesWorkspace):
        raise ConfigError(
            f"[rl.reward]: `{reward.workspace_command.command}` judges a workspace at the end of an episode, and "
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
    """What is known of an episode without judging it: from the record, else the newest score of this version."""
    if isinstance(reward, RecordedJudge) and (told := reward.from_record(trajectory, scores)) is not None:
        return told
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
    """One judgement of each, in order; together where the reward can."""
    if isinstance(reward, BatchReward):
        return await reward.judge_all(trajectories)
    return [await judge(reward, trajectory) for trajectory in trajectories]
