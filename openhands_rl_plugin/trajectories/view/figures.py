"""Figures over many episodes, in groups: how many, how good, how long, what went wrong and what training lacks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pydantic import Field

from openhands_rl_plugin.core.judgements import opinions
from openhands_rl_plugin.core.records import MISSING, TrajectorySummary
from openhands_rl_plugin.core.redaction import is_redacted
from openhands_rl_plugin.core.statistics import NORMAL_95, Estimate, paired_difference, wilson
from openhands_rl_plugin.core.types import Frozen, Node, Score, StopReason, Trajectory

REMEDY = (
    "training with rewards needs token ids and logprobs: serve the model with vLLM or `openhands-rl serve`, and let "
    "the agent use /v1/chat/completions; `evaluate` asks for a stock agent's with --token-ids"
)
_NAMES = {"token_ids": "token ids"}


async def gaps_by_episode(
    found: AsyncIterator[tuple[Trajectory, tuple[Score, ...]]],
) -> dict[str, Counter[str]]:
    """For each episode that lacks something, by its id: how many answers, by cause."""
    gaps: dict[str, Counter[str]] = {}
    async for trajectory, _ in found:
        if counted := Counter(_gaps(trajectory)):
            gaps[trajectory.id] = counted
    return gaps


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
        if node.sampled:
            yield from _of_answer(node, index in with_secret)
    unrecorded = trajectory.evidence.get("unrecorded")
    for path, count in unrecorded.items() if isinstance(unrecorded, dict) else ():
        if isinstance(count, int):
            yield from [f"not recorded: requests to /v1/{path}"] * min(count, 1_000_000)


def _of_answer(node: Node, with_secret: bool) -> Iterator[str]:
    told = list(causes_of(node.metadata))
    if node.tokens is None and not told:
        told = ["no token ids: dropped with a secret" if with_secret else "no token ids"]
    yield from told
    if unknown := node.metadata.get("unknown_before"):
        yield f"not recorded whole: {_kind(str(unknown))}"


def _kind(unknown: str) -> str:
    """The cause without what differs from request to request."""
    return "an earlier response was not recorded" if unknown.startswith("the earlier response") else unknown


GROUPINGS = ("run", "environment", "split", "strategy", "version", "task")
"""The keys that episodes may be grouped by."""

Succeeded = Callable[[TrajectorySummary, float], bool]
"""Whether an episode with this reward is a success."""

_MOST_RESAMPLED = 300
_CURVE_POINTS = 24


class GroupFigures(Frozen):
    """One group. Success, reward and turns are over its valid episodes: finished, without a failure, and
    with a reward.

    ``success`` is the share of successes, with its Wilson interval. ``curve`` has the mean reward
    of up to 24 stretches of equal length, oldest first. ``gaps``: what answers lack for training, by cause.
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
    curve: tuple[float, ...]
    gaps: dict[str, int] = Field(default_factory=dict)
    segments: dict[str, int] = Field(default_factory=dict)
    opinions: dict[str, Estimate] = Field(default_factory=dict)


async def figures_of(
    summaries: AsyncIterator[TrajectorySummary],
    by: Sequence[str],
    success: Succeeded,
    gaps: Mapping[str, Mapping[str, int]] | None = None,
    segments: Mapping[str, Mapping[str, int]] | None = None,
    said: Mapping[str, Mapping[str, float]] | None = None,
) -> tuple[GroupFigures, ...]:
    """Figures of every group, in the order in which the groups appear. Keeps a number an episode, no more.

    ``gaps``: of the episodes that lack something, by id; ``segments`` and ``said`` (``opinions``): of
    all that have some.
    """
    groups: dict[tuple[str, ...], _Group] = {}
    async for summary in summaries:
        group = groups.setdefault(tuple(_part(summary, each) for each in by), _Group())
        group.add(summary, success)
        group.gaps.update((gaps or {}).get(summary.id, {}))
        group.segments.update((segments or {}).get(summary.id, {}))
        for name, value in (said or {}).get(summary.id, {}).items():
            group.opinions.setdefault(name, []).append(value)
    return tuple(group.figures(name) for name, group in groups.items())


async def noting_opinions(
    found: AsyncIterator[tuple[Trajectory, tuple[Score, ...]]], said: dict[str, dict[str, float]]
) -> AsyncIterator[tuple[Trajectory, tuple[Score, ...]]]:
    """``found`` as it is; ``said`` gets the ``opinions`` of each episode that has some, by its id."""
    async for trajectory, scores in found:
        if trajectory.failure is None and (told := opinions(scores)):
            said[trajectory.id] = told
        yield trajectory, scores


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


@dataclass
class _Group:
    episodes: int = 0
    unfinished: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    calls: int = 0
    successes: int = 0
    rewards: list[float] = field(default_factory=list)
    stops: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    gaps: Counter[str] = field(default_factory=Counter)
    segments: Counter[str] = field(default_factory=Counter)
    opinions: dict[str, list[float]] = field(default_factory=dict)

    def add(self, summary: TrajectorySummary, success: Succeeded) -> None:
        self.episodes += 1
        self.unfinished += summary.stop is StopReason.UNFINISHED
        self.stops[summary.stop.value] += 1
        if summary.failure is not None:
            self.failures[summary.failure.value] += 1
        self.prompt_tokens += summary.usage.prompt_tokens
        self.sampled_tokens += summary.usage.completion_tokens
        self.calls += summary.usage.calls
        if (reward := reward_of(summary)) is not None:
            self.rewards.append(reward)
            self.successes += success(summary, reward)
            self.turns += summary.turns

    def figures(self, name: tuple[str, ...]) -> GroupFigures:
        valid = len(self.rewards)
        return GroupFigures(
            name=name,
            episodes=self.episodes,
            valid=valid,
            unfinished=self.unfinished,
            success=wilson(self.successes, valid),
            reward=mean_of(self.rewards),
            turns=self.turns / valid if valid else None,
            prompt_tokens=self.prompt_tokens,
            sampled_tokens=self.sampled_tokens,
            calls=self.calls,
            stops=dict(self.stops.most_common()),
            failures=dict(self.failures.most_common()),
            curve=_curve(self.rewards),
            gaps=dict(self.gaps.most_common()),
            segments=dict(self.segments.most_common()),
            opinions={name: mean_of(values) for name, values in self.opinions.items()},
        )


def _part(summary: TrajectorySummary, grouping: str) -> str:
    match grouping:
        case "run":
            return summary.run_id
        case "environment":
            return summary.environment
        case "split":
            return summary.split
        case "strategy":
            return summary.strategy
        case "version":
            return summary.policy.served_name
        case _:
            return summary.task_id


def _curve(rewards: Sequence[float]) -> tuple[float, ...]:
    points = min(_CURVE_POINTS, len(rewards))
    cuts = [at * len(rewards) // points for at in range(points + 1)] if points else [0]
    return tuple(sum(rewards[low:high]) / (high - low) for low, high in pairwise(cuts))
