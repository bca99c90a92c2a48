"""Figures over many episodes, in groups: how many, how good, how long, what went wrong and what training lacks; and
listings in which the scores of one reward stand as the rewards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from pydantic import Field

from openhands_rl_plugin.core.judgements import named_score, opinions, scores_of
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import MISSING, TrajectoryFilter, TrajectoryOrder, TrajectorySummary
from openhands_rl_plugin.core.redaction import is_redacted
from openhands_rl_plugin.core.statistics import NORMAL_95, Estimate, paired_difference, wilson
from openhands_rl_plugin.core.types import Frozen, Score, StopReason, Trajectory
from openhands_rl_plugin.trajectories.drift import segment_causes

REMEDY = (
    "training with rewards needs token ids and logprobs: serve the model with vLLM or `openhands-rl serve`, and let "
    "the agent use /v1/chat/completions; `evaluate` asks for a stock agent's with --token-ids"
)
_NAMES = {"token_ids": "token ids"}


class Notes(NamedTuple):
    """What the figures need of an episode beside its summary: what its answers lack for training, by cause; how many
    segments it has, by why they begin; and what people and verifiers say of it."""

    gaps: Counter[str]
    segments: Counter[str]
    opinions: Mapping[str, float]


def notes_of(trajectory: Trajectory, scores: Sequence[Score]) -> Notes:
    """The notes on an episode."""
    known = opinions(scores) if trajectory.failure is None else {}
    return Notes(Counter(_gaps(trajectory)), Counter(segment_causes(trajectory).values()), known)


def causes_of(metadata: Mapping[str, object]) -> Iterator[str]:
    """What a node's metadata says that it lacks, and why."""
    missing = metadata.get(MISSING)
    for what, why in missing.items() if isinstance(missing, dict) else ():
        yield f"no {_NAMES.get(what, what)}: {why}"


def _gaps(trajectory: Trajectory) -> Iterator[str]:
    with_secret: set[int] = set()
    for index, node in enumerate(trajectory.nodes):
        if node.parent in with_secret or is_redacted(node.message):
            with_secret.add(index)
        if not node.sampled:
            continue
        causes = [*causes_of(node.metadata)]
        if node.tokens is None and not causes:
            causes = ["no token ids: dropped with a secret" if index in with_secret else "no token ids"]
        yield from causes
        if unknown := str(node.metadata.get("unknown_before") or ""):
            # The cause without what differs from request to request.
            earlier = unknown.startswith("the earlier response")
            yield f"not recorded whole: {'an earlier response was not recorded' if earlier else unknown}"
    unrecorded = trajectory.evidence.get("unrecorded")
    for path, count in unrecorded.items() if isinstance(unrecorded, dict) else ():
        if isinstance(count, int):
            yield from [f"not recorded: requests to /v1/{path}"] * min(count, 1_000_000)


GROUPINGS: Mapping[str, Callable[[TrajectorySummary], str]] = {
    "run": attrgetter("run_id"),
    "environment": attrgetter("environment"),
    "split": attrgetter("split"),
    "strategy": attrgetter("strategy"),
    "version": attrgetter("policy.served_name"),
    "task": attrgetter("task_id"),
}
"""The keys that episodes may be grouped by."""

Succeeded = Callable[[TrajectorySummary, float], bool]
"""Whether an episode with this reward is a success."""

_MOST_RESAMPLED = 300


class GroupFigures(Frozen):
    """One group. Success, reward and turns are over its valid episodes: finished, without a failure, and
    with a reward.

    ``success`` is the share of successes, with its Wilson interval. ``gaps``: what answers lack for training, by cause.
    ``segments``: how many there are, by why they begin. ``opinions``: means of what people and verifiers say, which
    have no say in the reward.
    """

    name: tuple[str, ...]
    episodes: int
    valid: int
    unfinished: int
    success: Estimate
    reward: Estimate
    turns: float | None
    prompt_tokens: int
    sampled_tokens: int
    calls: int
    stops: dict[str, int]
    failures: dict[str, int]
    gaps: dict[str, int] = Field(default_factory=dict)
    segments: dict[str, int] = Field(default_factory=dict)
    opinions: dict[str, Estimate] = Field(default_factory=dict)


async def figures_of(
    summaries: AsyncIterator[TrajectorySummary],
    by: Sequence[str],
    success: Succeeded,
    notes: Mapping[str, Notes] | None = None,
) -> tuple[GroupFigures, ...]:
    """Figures of every group, in the order in which the groups appear. ``notes``: by the id of the episode."""
    groups: dict[tuple[str, ...], list[TrajectorySummary]] = {}
    async for summary in summaries:
        groups.setdefault(tuple(GROUPINGS[each](summary) for each in by), []).append(summary)
    return tuple(_figures(name, group, success, notes or {}) for name, group in groups.items())


def _figures(
    name: tuple[str, ...], group: Sequence[TrajectorySummary], success: Succeeded, notes: Mapping[str, Notes]
) -> GroupFigures:
    valid = [(each, reward) for each in group if (reward := reward_of(each)) is not None]
    rewards = [reward for _, reward in valid]
    noted = [notes[each.id] for each in group if each.id in notes]
    values: dict[str, list[float]] = {}
    for each in noted:
        for column, value in each.opinions.items():
            values.setdefault(column, []).append(value)
    return GroupFigures(
        name=name,
        episodes=len(group),
        valid=len(valid),
        unfinished=sum(each.stop is StopReason.UNFINISHED for each in group),
        success=wilson(sum(success(each, reward) for each, reward in valid), len(valid)),
        reward=mean_of(rewards),
        turns=sum(each.turns for each, _ in valid) / len(valid) if valid else None,
        prompt_tokens=sum(each.usage.prompt_tokens for each in group),
        sampled_tokens=sum(each.usage.completion_tokens for each in group),
        calls=sum(each.usage.calls for each in group),
        stops=_counted(each.stop.value for each in group),
        failures=_counted(each.failure.value for each in group if each.failure is not None),
        gaps=_counted(cause for each in noted for cause in each.gaps.elements()),
        segments=_counted(cause for each in noted for cause in each.segments.elements()),
        opinions={column: mean_of(each) for column, each in values.items()},
    )


def _counted(names: Iterator[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def reward_of(summary: TrajectorySummary) -> float | None:
    """The newest score, or the return when nothing scored the episode; ``None`` for no valid sample, or no reward."""
    if summary.failure is not None or summary.stop is StopReason.UNFINISHED:
        return None
    return summary.episode_return if summary.reward is None else summary.reward


def mean_of(values: Sequence[float]) -> Estimate:
    """Mean with its 95% interval: bootstrap of up to 300 values, the normal approximation of more."""
    if len(values) <= _MOST_RESAMPLED:
        return paired_difference([0.0] * len(values), values, resamples=2000)
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = NORMAL_95 * spread / math.sqrt(len(values))
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=len(values))


async def rewarded_by(
    storage: TrajectoryStorage, where: TrajectoryFilter, reward: str
) -> AsyncIterator[TrajectorySummary]:
    """What ``where`` finds when the newest scores of ``reward`` are the rewards: bounds and the order of rewards look
    at them. They have no return, which would be another reward. All scores of what the other conditions find are read,
    and ``where`` has no page. Raises ``StorageError``."""
    by_reward = where.sort is TrajectoryOrder.REWARD
    stored = {"sort": TrajectoryOrder.STORED, "descending": False} if by_reward else {}
    summaries = [each async for each in storage.summaries(without_rewards(where).model_copy(update=stored))]
    scores = await scores_of(storage, [each.id for each in summaries])
    least, most = where.reward_at_least, where.reward_at_most
    found: list[TrajectorySummary] = []
    for each in summaries:
        score = named_score(scores.get(each.id, ()), reward)
        value = None if score is None or each.failure else score.reward
        inside = value is not None and (least is None or value >= least) and (most is None or value <= most)
        if inside or least is most is None:
            found.append(each.model_copy(update={"reward": value, "episode_return": None}))
    if by_reward:
        sign = -1 if where.descending else 1
        found.sort(key=lambda each: math.inf if each.reward is None else sign * each.reward)
    for each in found:
        yield each


def without_rewards(where: TrajectoryFilter) -> TrajectoryFilter:
    """``where`` without what looks at rewards."""
    return where.model_copy(update={"reward_at_least": None, "reward_at_most": None})
