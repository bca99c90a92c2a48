"""Lists of episodes and figures as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from rich.table import Table

from openhands_rl_plugin.core.judgements import OPINIONS
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.records import TrajectorySummary
from openhands_rl_plugin.core.statistics import Estimate
from openhands_rl_plugin.trajectories.view.figures import GroupFigures, reward_of
from openhands_rl_plugin.trajectories.view.terminal import number, sparkline, table

SHORTEST_ID = 8
_LONGEST_NAME = 40


def list_table(summaries: Sequence[TrajectorySummary], said: Mapping[str, Mapping[str, float]] | None = None) -> Table:
    """An episode in a row; the ids are cut to their shortest distinct prefixes. ``said``: their ``opinions``, in
    columns of their own where there are some."""
    known = said or {}
    opinions = [name for name in OPINIONS if any(name in each for each in known.values())]
    ids = short_ids([summary.id for summary in summaries])
    rows = [
        (
            *(one_line(text, _LONGEST_NAME) for text in (short, each.run_id, each.task_id, each.strategy)),
            one_line(each.policy.served_name, _LONGEST_NAME),
            str(each.turns),
            number(reward_of(each)),
            *(number(known.get(each.id, {}).get(name)) for name in opinions),
            each.stop.value if each.failure is None else f"{each.stop.value} ({each.failure.value})",
            _when(each.times.finished),
        )
        for short, each in zip(ids, summaries, strict=True)
    ]
    columns = ("id", "run", "task", "strategy", "version", "turns", "reward", *opinions, "stop", "when")
    return table(columns, rows, numbers=("turns", "reward", *opinions))


def stats_table(groups: Sequence[GroupFigures], by: Sequence[str]) -> Table:
    """A group in a row. Means of opinions have columns of their own where there are some."""
    opinions = [name for name in OPINIONS if any(name in group.opinions for group in groups)]
    rows = [
        (
            *(one_line(part, _LONGEST_NAME) for part in group.name),
            str(group.episodes),
            str(group.valid),
            _with_interval(group.success),
            _with_interval(group.reward),
            *(_with_interval(group.opinions[name]) if name in group.opinions else "-" for name in opinions),
            number(group.turns),
            f"{group.prompt_tokens:,}",
            f"{group.sampled_tokens:,}",
            _counts(group.stops),
            _counts(group.failures) or "-",
            sparkline(group.curve),
        )
        for group in groups
    ]
    figures = ("episodes", "judged", "success", "reward", *opinions, "turns", "prompt tokens", "sampled tokens")
    return table((*by, *figures, "stops", "failures", "reward over time"), rows, numbers=figures)


def short_ids(ids: Sequence[str]) -> list[str]:
    """The ids, cut to the same length: at least eight characters, and enough to tell them apart."""
    length = SHORTEST_ID
    longest = max(map(len, ids), default=0)
    while length < longest and len({each[:length] for each in ids}) < len(set(ids)):
        length += 1
    return [each[:length] for each in ids]


def _when(seconds: float) -> str:
    """Date and time of this place; imported episodes may have none (0), or one that is no date."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s"


def _with_interval(estimate: Estimate) -> str:
    if not estimate.n:
        return "-"
    return f"{number(estimate.mean)} [{number(estimate.low)}, {number(estimate.high)}]"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
