"""On the terminal: lists of episodes and figures as tables, and an episode as its path of messages or as its tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from pydantic import JsonValue
from rich.console import Console
from rich.table import Table
from rich.text import Text

from openhands_rl_plugin.core.judgements import OPINIONS, standing
from openhands_rl_plugin.core.messages import counted, one_line, visible
from openhands_rl_plugin.core.records import STANDARD_PROMPT, TrajectorySummary, sub_agent_of
from openhands_rl_plugin.core.statistics import Estimate
from openhands_rl_plugin.core.types import TURN, Message
from openhands_rl_plugin.trajectories.view.episode import Episode, Turn
from openhands_rl_plugin.trajectories.view.figures import GroupFigures, reward_of
from openhands_rl_plugin.trajectories.view.terminal import number, table

SHORTEST_ID = 8
_LONGEST_NAME = 40


def list_table(summaries: Sequence[TrajectorySummary], held: Mapping[str, Mapping[str, float]] | None = None) -> Table:
    """An episode in a row; the ids are cut to their shortest distinct prefixes. ``held``: their ``opinions``, in
    columns of their own where there are some."""
    known = held or {}
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
        )
        for group in groups
    ]
    figures = ("episodes", "judged", "success", "reward", *opinions, "turns", "prompt tokens", "sampled tokens")
    return table((*by, *figures, "stops", "failures"), rows, numbers=figures)


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


MOST_LINES, MOST_CHARACTERS = 12, 1200
"""How much of a message is shown by default."""

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "magenta"}
_LINE_WIDTH = 70


def print_episode(console: Console, episode: Episode, *, full: bool = False) -> None:
    """Print the acted path: each message, and below it its cost and reward."""
    _print_head(console, episode)
    segment = 1
    for turn in episode.acted:
        if turn.segment is not None and turn.segment != segment:
            segment = turn.segment
            why = f" ({turn.segment_cause})" if turn.segment_cause else ""
            console.print(Text(f"── segment {segment}: this prompt does not extend the turn before{why} ──", "yellow"))
        console.print(Text(f"{_name(turn)}  {_figures(turn)}".rstrip(), f"bold {_STYLES[turn.message.role]}"))
        _print_report(console, turn, "  ")
        for line in _lines(turn.message, full):
            console.print(Text(f"  {line}"), soft_wrap=True)
    _print_totals(console, episode)


def print_tree(console: Console, episode: Episode) -> None:
    """Print every node in a line, deeper where the tree branches; ``●`` marks the acted path."""
    _print_head(console, episode)
    for turn, depth in _in_depth(episode):
        mark, text = ("●" if turn.acted else "○"), one_line(said_by(turn.message), _LINE_WIDTH)
        style = "bold" if turn.acted else "dim"
        console.print(Text(f"{'  ' * depth}{mark} {_name(turn)}  {_figures(turn)}  {text}", style), soft_wrap=True)
        _print_report(console, turn, "  " * (depth + 1))
    _print_totals(console, episode)


def _print_head(console: Console, episode: Episode) -> None:
    task = f"{episode.task.environment}/{episode.task.id}"
    console.print(Text(visible(f"{episode.id}  run {episode.run_id}  task {task}"), "bold"), soft_wrap=True)
    prompt = "" if episode.prompt == STANDARD_PROMPT else f"  prompt {episode.prompt}"
    console.print(Text(visible(f"{episode.strategy}  {episode.policy.served_name}{prompt}")), soft_wrap=True)
    if (link := sub_agent_of(episode.task)) is not None:
        console.print(Text(visible(f"sub-agent {link.kind} of {link.parent}")), soft_wrap=True)
    console.print()


def _print_report(console: Console, turn: Turn, indent: str) -> None:
    """In a line, the cost of the search that chose this answer."""
    if turn.search_report is not None:
        entries = ((name, entry) for name, entry in turn.search_report.items() if entry is not None)
        spent = "; ".join(f"{name.replace('_', ' ')} {_entry(entry)}" for name, entry in entries)
        console.print(Text(f"{indent}search: {visible(spent)}", "yellow"), soft_wrap=True)


def _entry(entry: JsonValue) -> str:
    if isinstance(entry, dict):
        return ", ".join(f"{_entry(count)} {what}" for what, count in entry.items())
    return number(entry) if isinstance(entry, int | float) else str(entry)


def _print_totals(console: Console, episode: Episode) -> None:
    totals = episode.totals
    console.print()
    ended = f"{episode.stop.value} after {counted(totals.turns, 'turn')} and {totals.seconds:.1f} s"
    console.print(Text(f"{ended}, return {number(totals.episode_return)}", "bold"))
    tokens = f"{totals.prompt_tokens:,} prompt and {totals.sampled_tokens:,} sampled tokens"
    console.print(Text(f"{tokens} in {counted(totals.segments, 'segment')}; {counted(totals.nodes, 'node')}"))
    if aside := sum(turn.turn is not None and not turn.acted for turn in episode.turns):
        console.print(Text(f"{counted(aside, 'more turn')} on other branches: see --tree"))
    for score in episode.scores:
        console.print(Text(visible(f"score {number(score.reward)} by {score.reward_version}")), soft_wrap=True)
    for label in standing(episode.labels):
        value = "" if label.value is None else f" {number(label.value)}"
        other = f" over {label.other}" if label.other else ""
        at = "" if label.node is None else f" on node {label.node}"
        at += "" if label.tokens is None else f", sampled tokens {label.tokens[0]} to {label.tokens[1] - 1}"
        line = f"{label.kind.value}{value}{other}{at}{f' by {label.author}' if label.author else ''}: {label.text}"
        console.print(Text(visible(line.removesuffix(": "))), soft_wrap=True)
    if (failure := episode.failure) is not None:
        line = f"failed ({failure.kind.value}, {failure.boundary}): {failure.message}"
        console.print(Text(visible(line), "red"), soft_wrap=True)


def _name(turn: Turn) -> str:
    kind = f" {turn.kind}" if turn.kind != TURN else ""
    return f"#{turn.node} {turn.message.role}{kind}" + (f" turn {turn.turn}" if turn.turn is not None else "")


def _figures(turn: Turn) -> str:
    new = f"+{turn.prompt_tokens or 0:,} prompt, {turn.sampled_tokens or 0:,} sampled"
    parts = (
        f"{new} of {turn.context_tokens:,} tokens" if turn.context_tokens is not None else None,
        "no token ids" if turn.context_tokens is None and turn.turn is not None and not turn.lacks else None,
        *turn.lacks,
        None if turn.reward is None else f"{'simulated ' if turn.simulated else ''}reward {number(turn.reward)}",
        None if turn.value is None else f"value {number(turn.value)}",
        f"{turn.visits} visits" if turn.visits else None,
        f"{turn.merged} merged" if turn.merged else None,
        None if turn.dropped is None else f"dropped: {one_line(turn.dropped, _LINE_WIDTH)}",
        None if turn.temperature is None else f"temperature {number(turn.temperature)}",
        None if turn.policy is None else turn.policy.served_name,
        None if turn.finish_reason in {None, "stop", "tool_calls"} else f"ended by {turn.finish_reason}",
    )
    return " · ".join(map(visible, filter(None, parts)))


def said_by(message: Message) -> str:
    """What a message says: its text, and its tool calls."""
    calls = (f"→ {call.name}({call.arguments})" for call in message.tool_calls)
    return "\n".join([*filter(None, [message.content]), *calls])


def _lines(message: Message, full: bool) -> Iterator[str]:
    text = said_by(message)
    lines = visible(text if full else text[:MOST_CHARACTERS]).split("\n")
    yield from lines if full else lines[:MOST_LINES]
    if not full and (len(lines) > MOST_LINES or len(text) > MOST_CHARACTERS):
        yield f"… cut: {len(text):,} characters in all; --full shows them"


def _in_depth(episode: Episode) -> Iterator[tuple[Turn, int]]:
    """Every node below its parent, with the number of places above it where the tree branches."""
    children: dict[int | None, list[Turn]] = {}
    for turn in episode.turns:
        children.setdefault(turn.parent, []).append(turn)
    waiting = [(turn, 0) for turn in reversed(children.get(None, []))]
    while waiting:
        turn, depth = waiting.pop()
        yield turn, depth
        below = children.get(turn.node, [])
        waiting += ((child, depth + (len(below) > 1)) for child in reversed(below))
