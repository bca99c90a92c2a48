"""Scores what is stored with one reward: task by task, kept as it goes, so that a killed run can be resumed.

What was judged before is never judged again by the same version, and never overwritten. What follows from labels is
brought up to date: a score is appended where it would be another one now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import batched

from openhands_rl_plugin.core.judgements import labels_of, scores_of
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, TrajectoryFilter, sub_agent_of
from openhands_rl_plugin.core.types import Failure, FailureKind, Score, Trajectory
from openhands_rl_plugin.rollout.scoring import JudgesLabels, ScoreReport, judge_all, known_score

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
