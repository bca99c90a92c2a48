"""Rewards over trajectories, one judgement or many together; ``rescoring`` judges what is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import batched
from typing import Any, Protocol, runtime_checkable

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, GraderError, boundary
from openhands_rl_plugin.core.judgements import VERDICT, asked_in_common, standing
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter, WorkspaceCommand, sub_agent_of
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject, Score, StopReason, Trajectory


@runtime_checkable
class JudgesLabels(Protocol):
    """A reward that follows from the labels of the episode. A capability, not a flag.

    Its stored scores are those of the labels when somebody last asked for them (``rescore``).
    """

    def from_labels(self, trajectory_id: str, labels: Sequence[Label]) -> Score | None:
        """The score that follows from an episode's ``labels``, without a reward where they contradict each other;
        ``None`` where no label counts."""
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


@dataclass
class ScoreReport:
    """The result of a scoring pass. ``unscored``: (trajectory id, reason) of episodes that stay without a score.

    ``withdrawn``: scores that no longer follow from the labels, and count no more.
    """

    scored: int = 0
    already_scored: int = 0
    withdrawn: int = 0
    unscored: list[tuple[str, Failure]] = field(default_factory=list)


def known_score(reward: Reward, trajectory: Trajectory, scores: Sequence[Score]) -> Score | None:
    """The score of an episode without judging it: from the record, else the newest score of this version.

    A reward that derives its score from others has ``from_record``. A derived score is computed each time and never
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
            answer = await reward(trajectory)
            if not isinstance(answer, Score) or answer.trajectory_id != trajectory.id:
                raise GraderError(f"episode {trajectory.id}: reward {reward.version} gave {answer!r:.80}")
            return answer
    except CaughtFailure as caught:
        return caught.failure


async def judge_all(reward: Reward, trajectories: Sequence[Trajectory]) -> list[Score | Failure]:
    """One judgement of each, in order; together where the reward can (``judge_all``)."""
    if (together := getattr(reward, "judge_all", None)) is not None:
        return await together(trajectories)
    return [await judge(reward, trajectory) for trajectory in trajectories]


AT_ONCE = 32
"""Episodes that are judged and stored together; attempts at one task are neighbours."""
UNLABELLED = "nobody gave a verdict on it: label it in the studio"
DIVIDED = "no more than half of its labellers agree"
_LABELS_AT_ONCE = 500


async def rescore(
    storage: TrajectoryStorage,
    reward: Reward,
    where: TrajectoryFilter | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    dry_run: bool = False,
    sub_agents: bool = True,
) -> ScoreReport:
    """Judge every matching episode that has ended and of which ``reward`` knows no score yet, and append the scores.

    ``on_progress`` gets the number of episodes examined so far, and of all. ``dry_run``: only count. ``sub_agents``:
    those of sub-agents, too, whose task is not that of a run. What is added to the store meanwhile is left for the next
    call.
    """
    where, follows = where or TrajectoryFilter(), isinstance(reward, JudgesLabels)
    if follows and where.failed is None:
        where = where.model_copy(update={"failed": False})
    ids, done, report = await _by_task(storage, where), 0, ScoreReport()
    for some in batched(ids, _LABELS_AT_ONCE if follows else AT_ONCE):
        if isinstance(reward, JudgesLabels):
            scores = await _by_labels(storage, reward, reward.version, some, report)
        else:
            scores = await _judged(storage, reward, some, report, dry_run=dry_run, sub_agents=sub_agents)
        if not dry_run:
            await storage.add_scores(scores)
        done += len(some)
        if on_progress is not None:
            on_progress(done, len(ids))
    return report


async def _judged(
    storage: TrajectoryStorage,
    reward: Reward,
    ids: Sequence[str],
    report: ScoreReport,
    *,
    dry_run: bool,
    sub_agents: bool,
) -> list[Score]:
    """The scores of the episodes of which this reward knows none yet."""
    open_ones: dict[str, Trajectory] = {}
    async for trajectory, scores in storage.find(TrajectoryFilter(ids=tuple(ids))):
        if known_score(reward, trajectory, scores) is not None:
            report.already_scored += 1
        elif sub_agents or not sub_agent_of(trajectory.task):
            open_ones[trajectory.id] = trajectory
    waiting = [open_ones[each] for each in ids if each in open_ones]
    outcomes = await judge_all(reward, waiting) if waiting and not dry_run else []
    made = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    pairs = zip(waiting, outcomes, strict=False)
    report.unscored += [(one.id, outcome) for one, outcome in pairs if isinstance(outcome, Failure)]
    report.scored += len(waiting) if dry_run else len(made)
    return made


async def _by_labels(
    storage: TrajectoryStorage, reward: JudgesLabels, version: str, ids: Sequence[str], report: ScoreReport
) -> list[Score]:
    """The scores that differ from those stored. No node is read; a killed run leaves whole batches."""
    labels: dict[str, list[Label]] = {identity: [] for identity in ids}
    for label in await storage.labels(ids):
        labels[label.trajectory_id].append(label)
    stored, changed = await storage.scores(ids), list[Score]()
    for identity in ids:
        before = next((each for each in reversed(stored.get(identity, ())) if each.reward_version == version), None)
        now = reward.from_labels(identity, labels[identity])
        if now is None or now.reward is None:
            why = UNLABELLED if now is None else DIVIDED
            report.unscored.append((identity, Failure(kind=FailureKind.GRADER, message=why, boundary=version)))
            if before is not None and before.reward is not None:
                report.withdrawn += 1
                changed.append(before.model_copy(update={"reward": None, "detail": {"because": why}}))
        elif before is not None and (before.reward, before.detail) == (now.reward, now.detail):
            report.already_scored += 1
        else:
            report.scored += 1
            changed.append(now)
    return changed


async def stored_rewards(
    storage: TrajectoryStorage, reward: Reward, trajectories: Sequence[Trajectory]
) -> list[float | None]:
    """The known reward of each trajectory, ``None`` where there is none, in the given order.

    Nothing is judged. A failed episode has none, whatever is stored.
    """
    valid = tuple(trajectory.id for trajectory in trajectories if trajectory.failure is None)
    found: dict[str, float | None] = {}
    async for trajectory, scores in storage.find(TrajectoryFilter(ids=valid)):
        known = known_score(reward, trajectory, scores)
        found[trajectory.id] = known.reward if known is not None else None
    return [found.get(trajectory.id) for trajectory in trajectories]


async def _by_task(storage: TrajectoryStorage, where: TrajectoryFilter) -> list[str]:
    """Ids of the matching episodes. Attempts at one task stand together, for what their prompts have in common."""
    found: list[tuple[str, str, int, str]] = []
    async for summary in storage.summaries(where.model_copy(update={"finished": True})):
        found.append((summary.environment, summary.task_id, len(found), summary.id))
    return [name for *_, name in sorted(found)]


_BEHIND = "label"
"""Key in the detail of a score by hand: the id of the verdict that it comes from."""


def check_judged(*attempts: Trajectory) -> None:
    """Raises ``ConfigError`` where a judgement of one would not count, or several cannot be compared."""
    for each in attempts:
        if each.stop is StopReason.UNFINISHED or each.failure is not None:
            why = f"failed ({each.failure.kind})" if each.failure is not None else "has not ended yet"
            raise ConfigError(f"{each.id} {why}: no judgement of it would count")
    tasks = {asked_in_common(each.task) for each in attempts}
    if len(tasks) > 1 or len({each.id for each in attempts}) < len(attempts):
        raise ConfigError(f"{attempts[0].id} and {attempts[-1].id} are not two attempts at one task")


async def give_score(
    storage: TrajectoryStorage, trajectory_id: str, value: float | None, *, note: str = "", author: str = ""
) -> None:
    """Append a score by hand and the verdict behind it; ``None`` withdraws the one before. Raises ``StorageError``."""
    identity = uuid.uuid4().hex
    given = {"note": note, "author": author, _BEHIND: identity}
    detail: JsonObject = {name: text for name, text in given.items() if text}
    # First, because it is what counts if the process ends in between.
    await storage.add_scores([Score(trajectory_id=trajectory_id, reward=value, detail=detail, reward_version=VERDICT)])
    fields = {"value": value, "text": note, "author": author}
    await add_label(storage, trajectory_id, LabelKind.VERDICT, identity=identity, **fields)


async def withdraw(storage: TrajectoryStorage, label: Label, *, author: str = "") -> Label:
    """Append what says that ``label`` holds no more. If the newest score by hand was stored with it, the score before
    holds again. Returns what was appended. Raises ``RLError``."""
    if label.kind is LabelKind.VERDICT and label.node is None:
        scores = (await storage.scores([label.trajectory_id])).get(label.trajectory_id, ())
        newest_first = [score for score in reversed(scores) if score.reward_version == VERDICT]
        if newest_first and newest_first[0].detail.get(_BEHIND) == label.id:
            holding = {each.id for each in standing(await storage.labels([label.trajectory_id]))} - {label.id}
            none = newest_first[0].model_copy(update={"reward": None, "detail": {}})
            before = (each for each in newest_first if each.reward is None or each.detail.get(_BEHIND) in holding)
            await storage.add_scores([next(before, none)])
    named = {"other": label.other, "withdraws": label.id, "author": author}
    return await add_label(storage, label.trajectory_id, label.kind, **named)


async def add_label(
    storage: TrajectoryStorage, trajectory_id: str, kind: LabelKind, *, identity: str = "", **fields: Any
) -> Label:
    """Append a label with these fields; of several verdicts by one author the last one counts. Raises ``RLError``."""
    made = Label(id=identity or uuid.uuid4().hex, trajectory_id=trajectory_id, kind=kind, at=time.time(), **fields)
    await storage.add_labels([made])
    return made
