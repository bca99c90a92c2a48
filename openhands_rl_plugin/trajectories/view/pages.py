"""An episode on the terminal: the acted path with all messages, or the tree with a line for each node."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue
from rich.console import Console
from rich.text import Text

from openhands_rl_plugin.core.judgements import standing
from openhands_rl_plugin.core.messages import counted, one_line, visible
from openhands_rl_plugin.core.records import STANDARD_PROMPT, sub_agent_of
from openhands_rl_plugin.core.types import TURN, Message
from openhands_rl_plugin.trajectories.view.episode import Episode, Turn
from openhands_rl_plugin.trajectories.view.terminal import number

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
        mark, said = ("●" if turn.acted else "○"), one_line(said_by(turn.message), _LINE_WIDTH)
        style = "bold" if turn.acted else "dim"
        console.print(Text(f"{'  ' * depth}{mark} {_name(turn)}  {_figures(turn)}  {said}", style), soft_wrap=True)
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
        told = "; ".join(f"{name.replace('_', ' ')} {_entry(entry)}" for name, entry in entries)
        console.print(Text(f"{indent}search: {visible(told)}", "yellow"), soft_wrap=True)


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
        said = f"{label.kind.value}{value}{other}{at}{f' by {label.author}' if label.author else ''}: {label.text}"
        console.print(Text(visible(said.removesuffix(": "))), soft_wrap=True)
    if (failure := episode.failure) is not None:
        told = f"failed ({failure.kind.value}, {failure.boundary}): {failure.message}"
        console.print(Text(visible(told), "red"), soft_wrap=True)


def _name(turn: Turn) -> str:
    kind = f" {turn.kind}" if turn.kind != TURN else ""
    return f"#{turn.node} {turn.message.role}{kind}" + (f" turn {turn.turn}" if turn.turn is not None else "")


def _figures(turn: Turn) -> str:
    parts = []
    if turn.prompt_tokens is not None:
        new = f"+{turn.prompt_tokens:,} prompt, {turn.sampled_tokens:,} sampled"
        parts.append(f"{new} of {turn.context_tokens:,} tokens")
    elif turn.turn is not None and not turn.lacks:
        parts.append("no token ids")
    parts += map(visible, turn.lacks)
    if turn.reward is not None:
        parts.append(f"{'simulated ' if turn.simulated else ''}reward {number(turn.reward)}")
    if turn.value is not None:
        parts.append(f"value {number(turn.value)}")
    if turn.visits:
        parts.append(f"{turn.visits} visits")
    if turn.merged:
        parts.append(f"{turn.merged} merged")
    if turn.dropped is not None:
        parts.append(visible(f"dropped: {one_line(turn.dropped, _LINE_WIDTH)}"))
    if turn.temperature is not None:
        parts.append(f"temperature {number(turn.temperature)}")
    if turn.policy is not None:
        parts.append(visible(turn.policy.served_name))
    if turn.finish_reason not in {None, "stop", "tool_calls"}:
        parts.append(visible(f"ended by {turn.finish_reason}"))
    return " · ".join(parts)


def said_by(message: Message) -> str:
    """What a message says: its text, and its tool calls."""
    calls = (f"→ {call.name}({call.arguments})" for call in message.tool_calls)
    return "\n".join([*filter(None, [message.content]), *calls])


def _lines(message: Message, full: bool) -> Iterator[str]:
    said = said_by(message)
    lines = visible(said if full else said[:MOST_CHARACTERS]).split("\n")
    yield from lines if full else lines[:MOST_LINES]
    if not full and (len(lines) > MOST_LINES or len(said) > MOST_CHARACTERS):
        yield f"… cut: {len(said):,} characters in all; --full shows them"


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
