"""Rewards over trajectories, one judgement or many together; ``rescoring`` judges what is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any, Protocol, runtime_checkable

from pydantic import ValidationError

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, GraderError, boundary, describe
from openhands_rl_plugin.core.judgements import ALIKE, VERDICT, labels_of, scores_of, standing
from openhands_rl_plugin.core.protocols import Reward, TakesLabels, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter, WorkspaceCommand, sub_agent_of
from openhands_rl_plugin.core.types import Failure, FailureKind, Frozen, JsonObject, Score, Trajectory


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
            try:
                answer = await reward(trajectory)
                if not isinstance(answer, Score) or answer.trajectory_id != trajectory.id:
                    raise GraderError(f"episode {trajectory.id}: reward {reward.version} gave {answer!r:.80}")
                return Score.model_validate(vars(answer))
            except ValidationError as error:
                raise GraderError(f"episode {trajectory.id}: reward {reward.version}: {describe(error)}") from error
    except CaughtFailure as caught:
        return caught.failure


async def judge_all(reward: Reward, trajectories: Sequence[Trajectory]) -> list[Score | Failure]:
    """One judgement of each, in order; together where the reward can (``judge_all``)."""
    if (together := getattr(reward, "judge_all", None)) is not None:
        return await together(trajectories)
    return [await judge(reward, trajectory) for trajectory in trajectories]


AT_ONCE = 32
"""Episodes that are judged and stored together; attempts at one task are neighbours."""
UNLABELLED = "nobody gave a verdict on it: openhands-rl label STORE, or the studio"
DIVIDED = "no more than half of its labellers said the same (label:disputed finds it)"
_LABELS_AT_ONCE = 500


@dataclass(frozen=True)
class ScoreProgress:
    """Counts of a run: episodes examined so far, of how many, and how many of those had a score already."""

    done: int
    total: int
    already: int


async def rescore(
    storage: TrajectoryStorage,
    reward: Reward,
    where: TrajectoryFilter | None = None,
    *,
    on_progress: Callable[[ScoreProgress], None] | None = None,
    dry_run: bool = False,
    sub_agents: bool = True,
) -> ScoreReport:
    """Judge every matching episode that has ended and of which ``reward`` knows no score yet, and append the scores.

    ``dry_run``: only count. ``sub_agents``: those of sub-agents, too, whose task is not that of a run. What is added to
    the store meanwhile is left for the next call.
    """
    if isinstance(reward, JudgesLabels):
        return await _follow_labels(storage, reward, where or TrajectoryFilter(), on_progress, dry_run=dry_run)
    ids = await _by_task(storage, where or TrajectoryFilter())
    scored = already = done = 0
    unscored: list[tuple[str, Failure]] = []
    for start in range(0, len(ids), AT_ONCE):
        some = ids[start : start + AT_ONCE]
        open_ones, known = await _without_score(storage, some, reward)
        if not sub_agents:
            open_ones = [each for each in open_ones if not sub_agent_of(each.task)]
        already += known
        outcomes = await judge_all(reward, open_ones) if open_ones and not dry_run else []
        scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
        pairs = zip(open_ones, outcomes, strict=False)
        unscored += [(one.id, outcome) for one, outcome in pairs if isinstance(outcome, Failure)]
        await storage.add_scores(scores)
        scored += len(open_ones) if dry_run else len(scores)
        done += len(some)
        if on_progress is not None:
            on_progress(ScoreProgress(done, len(ids), already))
    return ScoreReport(scored=scored, already_scored=already, unscored=tuple(unscored))


async def _follow_labels(
    storage: TrajectoryStorage,
    reward: Reward,
    where: TrajectoryFilter,
    on_progress: Callable[[ScoreProgress], None] | None,
    *,
    dry_run: bool,
) -> ScoreReport:
    """No node is read. A killed run leaves whole batches, and the next one stores what still differs."""
    assert isinstance(reward, JudgesLabels), "the caller has looked"
    ids = await _by_task(storage, where if where.failed is not None else where.model_copy(update={"failed": False}))
    scored = already = withdrawn = done = 0
    unscored: list[tuple[str, Failure]] = []
    for some in batched(ids, _LABELS_AT_ONCE):
        labels: dict[str, list[Label]] = {identity: [] for identity in some}
        for label in await labels_of(storage, some):
            labels[label.trajectory_id].append(label)
        stored = await scores_of(storage, some)
        changed: list[Score] = []
        for identity in some:
            own = [each for each in stored.get(identity, ()) if each.reward_version == reward.version]
            before, now = own[-1] if own else None, reward.from_labels(identity, labels[identity])
            if now is None or now.reward is None:
                why = UNLABELLED if now is None else DIVIDED
                unscored.append((identity, Failure(kind=FailureKind.GRADER, message=why, boundary=reward.version)))
                if before is not None and before.reward is not None:
                    withdrawn += 1
                    changed.append(before.model_copy(update={"reward": None, "detail": {"because": why}}))
            elif before is not None and (before.reward, before.detail) == (now.reward, now.detail):
                already += 1
            else:
                scored += 1
                changed.append(now)
        if not dry_run:
            await storage.add_scores(changed)
        done += len(some)
        if on_progress is not None:
            on_progress(ScoreProgress(done, len(ids), already))
    return ScoreReport(scored=scored, already_scored=already, withdrawn=withdrawn, unscored=tuple(unscored))


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


async def _without_score(
    storage: TrajectoryStorage, ids: Sequence[str], reward: Reward
) -> tuple[list[Trajectory], int]:
    """The episodes of which this reward knows no score, in the order of ``ids``, and the number of the others."""
    open_ones: dict[str, Trajectory] = {}
    known = 0
    async for trajectory, scores in storage.find(TrajectoryFilter(ids=tuple(ids))):
        if known_score(reward, trajectory, scores) is not None:
            known += 1
        else:
            open_ones[trajectory.id] = trajectory
    return [open_ones[each] for each in ids if each in open_ones], known


SKIPPED = "skipped"
"""The tag of an episode, or of two, that somebody looked at without a verdict."""

_BEHIND = "label"
"""In the detail of a score by hand: the id of the verdict behind it."""
_Said = tuple[float | None, str, str]
"""Value, note and author: what a verdict and a score that an earlier version stored with it have in common."""


async def give_score(
    storage: TrajectoryStorage, trajectory_id: str, value: float | None, *, note: str = "", author: str = ""
) -> None:
    """Append a score by hand and the verdict behind it; ``None`` withdraws the one before. Raises ``StorageError``."""
    identity = uuid.uuid4().hex if isinstance(storage, TakesLabels) else ""
    # First, because it is what counts if the process ends in between.
    await _score(storage, trajectory_id, value, (note, author), identity)
    if isinstance(storage, TakesLabels):
        said = {"value": value, "text": note, "author": author}
        await _add(storage, trajectory_id, LabelKind.VERDICT, identity=identity, **said)


async def give_verdict(
    storage: TrajectoryStorage, trajectory_id: str, value: float, *, note: str = "", author: str = ""
) -> None:
    """Add a verdict; of several by one author the last one counts. Raises ``RLError``."""
    await _add(labelled(storage), trajectory_id, LabelKind.VERDICT, value=value, text=note, author=author)


async def prefer(
    storage: TrajectoryStorage, better: str, other: str, *, alike: bool = False, note: str = "", author: str = ""
) -> None:
    """Say that one episode is better than another, or, with ``alike``, that neither is. Raises ``RLError``."""
    value = ALIKE if alike else 1.0
    labels = labelled(storage)
    await _add(labels, better, LabelKind.PREFERENCE, value=value, other=other, text=note, author=author)


async def comment(storage: TrajectoryStorage, trajectory_id: str, text: str, *, author: str = "") -> None:
    """Add a remark. Raises ``RLError``."""
    await _add(labelled(storage), trajectory_id, LabelKind.COMMENT, text=text, author=author)


async def skip(storage: TrajectoryStorage, trajectory_id: str, *, other: str | None = None, author: str = "") -> None:
    """Note that somebody said nothing of an episode, or of two, so that it is not asked for again."""
    if isinstance(storage, TakesLabels):
        await _add(storage, trajectory_id, LabelKind.TAG, other=other, text=SKIPPED, author=author)


async def is_done(storage: TrajectoryStorage, trajectory_id: str) -> bool:
    """Whether somebody gave a verdict on the episode, or none on purpose."""
    labels = standing(await labels_of(storage, [trajectory_id]))
    return any(map(_is_answer, labels))


def _is_answer(label: Label) -> bool:
    if label.kind is LabelKind.VERDICT:
        return label.node is None and label.value is not None
    return label.kind is LabelKind.TAG and label.text == SKIPPED and label.other is None


async def undo(storage: TrajectoryStorage, *, author: str = "") -> Label | None:
    """Withdraw the newest label of ``author``; an earlier verdict of theirs holds again.

    Returns:
        The withdrawn label, ``None`` when there is none.

    Raises:
        RLError: the storage cannot be written, or keeps no labels.
    """
    labelled(storage)
    ids = [summary.id async for summary in storage.summaries(TrajectoryFilter(finished=None))]
    own = [label for label in standing(await labels_of(storage, ids)) if label.author == author]
    if not own:
        return None
    last = max(own, key=lambda label: label.at)
    await withdraw(storage, last, author=author)
    return last


async def withdraw(storage: TrajectoryStorage, label: Label, *, author: str = "") -> Label:
    """Append what says that ``label`` holds no more. If the newest score by hand was stored with it, the score before
    holds again. Returns what was appended. Raises ``RLError``."""
    labels = labelled(storage)
    if label.kind is LabelKind.VERDICT and label.node is None:
        known = await labels_of(storage, [label.trajectory_id])
        scores = (await scores_of(storage, [label.trajectory_id])).get(label.trajectory_id, ())
        scored = _scored(known, [score for score in scores if score.reward_version == VERDICT])
        if scored and scored[-1].id == label.id:
            before = [each for each in standing(known) if each in scored and each.id != label.id]
            value, said, identity = None, ("", author), ""
            if before:
                value, said, identity = before[-1].value, (before[-1].text, before[-1].author), before[-1].id
            await _score(storage, label.trajectory_id, value, said, identity)
    return await _add(labels, label.trajectory_id, label.kind, other=label.other, withdraws=label.id, author=author)


async def add_label(storage: TrajectoryStorage, trajectory_id: str, kind: LabelKind, **said: Any) -> Label:
    """Append a label with these fields. Raises ``RLError``."""
    return await _add(labelled(storage), trajectory_id, kind, **said)


def labelled(storage: TrajectoryStorage) -> TakesLabels:
    """The storage as one that keeps labels. Raises ``ConfigError`` for another."""
    if isinstance(storage, TakesLabels):
        return storage
    raise ConfigError(
        f"{type(storage).__name__} keeps no labels, only scores (openhands-rl score STORE --id ID --value 1, or none)"
    )


def _scored(labels: Iterable[Label], scores: Sequence[Score]) -> list[Label]:
    """The verdicts with which a score was stored, in the order of these scores. Those of earlier versions name no
    label: there a verdict and its score say the same."""
    verdicts = [label for label in labels if label.kind is LabelKind.VERDICT and label.withdraws is None]
    by_id = {label.id: label for label in verdicts}
    named = {str(score.detail.get(_BEHIND)) for score in scores}
    found: list[Label] = []
    for score in scores:
        label = by_id.get(str(score.detail.get(_BEHIND)))
        if _BEHIND not in score.detail:
            alike = [each for each in verdicts if each.id not in named and _said(each) == _said_by(score)]
            # One that is there already was said again, because what came after it was taken back.
            label = next((each for each in alike if each not in found), alike[0] if alike else None)
        if score.reward is None:
            found.clear()
        elif label is not None:
            found = [*(each for each in found if each.id != label.id), label]
    return found


def _said(label: Label) -> _Said:
    return label.value, label.text, label.author


def _said_by(score: Score) -> _Said:
    return score.reward, str(score.detail.get("note", "")), str(score.detail.get("author", ""))


async def _score(
    storage: TrajectoryStorage, trajectory_id: str, value: float | None, said: tuple[str, str], label: str
) -> None:
    known = {"note": said[0], "author": said[1], _BEHIND: label}
    detail: JsonObject = {name: text for name, text in known.items() if text}
    score = Score(trajectory_id=trajectory_id, reward=value, detail=detail, reward_version=VERDICT)
    await storage.add_scores([score])


async def _add(storage: TakesLabels, trajectory_id: str, kind: LabelKind, *, identity: str = "", **said: Any) -> Label:
    label = identity or uuid.uuid4().hex
    made = Label(id=label, trajectory_id=trajectory_id, kind=kind, at=time.time(), **said)
    await storage.add_labels([made])
    return made
