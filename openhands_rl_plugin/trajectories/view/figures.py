"""Lists of episodes, and figures over many in groups: how many, how good, how long, what went wrong and what training
lacks. The scores of one reward may stand as the rewards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, NamedTuple

from rich.table import Table

from openhands_rl_plugin.core.judgements import OPINIONS, named_score, opinions, scores_of
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import MISSING, TrajectoryFilter, TrajectoryOrder, TrajectorySummary
from openhands_rl_plugin.core.redaction import is_redacted
from openhands_rl_plugin.core.statistics import Estimate, paired_difference, wilson
from openhands_rl_plugin.core.types import Score, StopReason, Trajectory
from openhands_rl_plugin.trajectories.drift import segment_causes
from openhands_rl_plugin.trajectories.view.terminal import number, table

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


GROUPINGS: Mapping[str, Callable[[TrajectorySummary], str]] = {
    **{name: attrgetter(name) for name in ("environment", "split", "strategy")},
    "run": attrgetter("run_id"),
    "version": attrgetter("policy.served_name"),
    "task": attrgetter("task_id"),
}
"""The keys that episodes may be grouped by."""

Succeeded = Callable[[TrajectorySummary, float], bool]
"""Whether an episode with this reward is a success."""


async def figures_of(
    summaries: AsyncIterator[TrajectorySummary],
    by: Sequence[str],
    success: Succeeded,
    notes: Mapping[str, Notes] | None = None,
) -> list[dict[str, Any]]:
    """Figures of every group, in the order in which the groups appear. ``notes``: by the id of the episode.

    Success, reward and turns are over a group's valid episodes: finished, without a failure, and with a reward.
    ``success`` is the share of successes, with its Wilson interval. ``gaps``: what answers lack for training, by cause.
    ``segments``: how many there are, by why they begin. ``opinions``: means of what people and verifiers say, which
    have no say in the reward.
    """
    groups: dict[tuple[str, ...], list[TrajectorySummary]] = {}
    async for summary in summaries:
        groups.setdefault(tuple(GROUPINGS[each](summary) for each in by), []).append(summary)
    figures: list[dict[str, Any]] = []
    for name, group in groups.items():
        valid = [(each, reward) for each in group if (reward := reward_of(each)) is not None]
        noted = [notes[each.id] for each in group if notes and each.id in notes]
        columns = {column: [each.opinions[column] for each in noted if column in each.opinions] for column in OPINIONS}
        figures.append(
            {
                "name": name,
                "episodes": len(group),
                "valid": len(valid),
                "unfinished": sum(each.stop is StopReason.UNFINISHED for each in group),
                "success": wilson(sum(success(each, reward) for each, reward in valid), len(valid)),
                "reward": mean_of([reward for _, reward in valid]),
                "turns": sum(each.turns for each, _ in valid) / len(valid) if valid else None,
                "prompt_tokens": sum(each.usage.prompt_tokens for each in group),
                "sampled_tokens": sum(each.usage.completion_tokens for each in group),
                "calls": sum(each.usage.calls for each in group),
                "stops": _counted(each.stop.value for each in group),
                "failures": _counted(each.failure.value for each in group if each.failure is not None),
                "gaps": _counted(cause for each in noted for cause in each.gaps.elements()),
                "segments": _counted(cause for each in noted for cause in each.segments.elements()),
                "opinions": {column: mean_of(values) for column, values in columns.items() if values},
            }
        )
    return figures


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def reward_of(summary: TrajectorySummary) -> float | None:
    """The newest score, or the return when nothing scored the episode; ``None`` for no valid sample, or no reward."""
    return None if summary.stop is StopReason.UNFINISHED else summary.judged


def mean_of(values: Sequence[float]) -> Estimate:
    """Mean with its 95% interval by bootstrap, whose resamples are fewer the more values there are."""
    resamples = max(200, min(2000, 600_000 // (len(values) or 1)))
    return paired_difference([0.0] * len(values), values, resamples=resamples)


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


_SHORTEST_ID = 8
_LONGEST_NAME = 40


def list_table(summaries: Sequence[TrajectorySummary], held: Mapping[str, Mapping[str, float]]) -> Table:
    """An episode in a row; the ids are cut to their shortest distinct prefixes. ``held``: their ``opinions``, in
    columns of their own where there are some."""
    columns = [name for name in OPINIONS if any(name in each for each in held.values())]
    ids = short_ids([summary.id for summary in summaries])
    rows = [
        (
            *(one_line(text, _LONGEST_NAME) for text in (short, each.run_id, each.task_id, each.strategy)),
            one_line(each.policy.served_name, _LONGEST_NAME),
            str(each.turns),
            number(reward_of(each)),
            *(number(held.get(each.id, {}).get(name)) for name in columns),
            each.stop.value if each.failure is None else f"{each.stop.value} ({each.failure.value})",
            _when(each.times.finished),
        )
        for short, each in zip(ids, summaries, strict=True)
    ]
    names = ("id", "run", "task", "strategy", "version", "turns", "reward", *columns, "stop", "when")
    return table(names, rows, numbers=("turns", "reward", *columns))


def stats_table(groups: Sequence[Mapping[str, Any]], by: Sequence[str]) -> Table:
    """A group in a row. Means of opinions have columns of their own where there are some."""
    columns = [name for name in OPINIONS if any(name in group["opinions"] for group in groups)]
    rows = [
        (
            *(one_line(part, _LONGEST_NAME) for part in group["name"]),
            str(group["episodes"]),
            str(group["valid"]),
            *map(_interval, (group["success"], group["reward"], *(group["opinions"].get(name) for name in columns))),
            number(group["turns"]),
            f"{group['prompt_tokens']:,}",
            f"{group['sampled_tokens']:,}",
            *(", ".join(f"{name} {n}" for name, n in group[each].items()) or "-" for each in ("stops", "failures")),
        )
        for group in groups
    ]
    figures = ("episodes", "judged", "success", "reward", *columns, "turns", "prompt tokens", "sampled tokens")
    return table((*by, *figures, "stops", "failures"), rows, numbers=figures)


def short_ids(ids: Sequence[str]) -> list[str]:
    """The ids, cut to the same length: at least eight characters, and enough to tell them apart."""
    lengths = range(_SHORTEST_ID, max(map(len, ids), default=0))
    enough = (length for length in lengths if len({each[:length] for each in ids}) == len(set(ids)))
    length = next(enough, None)
    return [each[:length] for each in ids]


def _when(seconds: float) -> str:
    """Date and time of this place; imported episodes may have none (0), or one that is no date."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s"


def _interval(estimate: Estimate | None) -> str:
    if estimate is None or not estimate.n:
        return "-"
    return f"{number(estimate.mean)} [{number(estimate.low)}, {number(estimate.high)}]"
