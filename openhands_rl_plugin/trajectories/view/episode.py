"""One stored episode for display: its turns, its segments and their totals, as JSON or on a terminal."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field, JsonValue
from rich.console import Console
from rich.text import Text

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.judgements import standing
from openhands_rl_plugin.core.messages import counted, one_line, transcript_nodes, visible
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import STANDARD_PROMPT, Label, TrajectoryFilter, prompt_of, sub_agent_of
from openhands_rl_plugin.core.types import TURN, JsonObject, Message, Node, Score, Tokens, Trajectory, kind_of
from openhands_rl_plugin.trajectories.drift import segment_causes
from openhands_rl_plugin.trajectories.view.figures import causes_of
from openhands_rl_plugin.trajectories.view.terminal import number

MOST_NAMED = 10
"""How many of the ids that match a prefix are listed."""


class Turn(Node):
    """A node and its place in the episode. ``prompt_tokens`` is what this turn added, ``context_tokens`` the length of
    all that the model saw.

    ``turn`` counts the sampled nodes above and ``segment`` the runs of turns that extend each other, both from 1; they
    are ``None`` where nothing was sampled, and ``segment`` also where there are no token ids. ``segment_cause``: why
    one begins here. ``kind``: a message of the episode, or of what was asked beside it, such as a condensation.

    ``search``: what a search noted, such as ``merged`` (so many equal answers were taken for this one), ``dropped``
    (why the branch was given up) and ``report`` (what the decision for this answer cost). ``temperature`` is the one
    that the answer was sampled at, ``lacks`` what training misses in it, and why.
    """

    tokens: Tokens | None = Field(default=None, exclude=True)
    metadata: JsonObject = Field(default_factory=dict, exclude=True)
    node: int
    acted: bool
    turn: int | None = None
    segment: int | None = None
    segment_cause: str | None = None
    kind: str = TURN
    search: JsonObject = Field(default_factory=dict)
    temperature: float | None = None
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None
    context_tokens: int | None = None
    lacks: tuple[str, ...] = ()


async def find_episode(storage: TrajectoryStorage, beginning: str) -> tuple[Trajectory, tuple[Score, ...]]:
    """The episode whose id begins like that, finished or not. Raises ``StorageError`` unless there is just one."""
    ids = [beginning] if await storage.count(TrajectoryFilter(ids=(beginning,), finished=None)) else []
    if not ids:
        where = TrajectoryFilter(contains=beginning, finished=None)
        ids = [each.id async for each in storage.summaries(where) if each.id.startswith(beginning)]
        if len(ids) > 1:
            named = ", ".join(ids[:MOST_NAMED]) + (" ..." if len(ids) > MOST_NAMED else "")
            raise StorageError(
                f"{len(ids)} episodes have an id that begins with {beginning!r}; give more of it: {named}"
            )
    async for found in storage.find(TrajectoryFilter(ids=tuple(ids), finished=None)):
        return found
    raise StorageError(f"no episode has an id that begins with {beginning!r}; `openhands-rl list` lists them")


def turns_of(trajectory: Trajectory) -> tuple[Turn, ...]:
    """Every node of the tree, in the order of their making."""
    executed, causes = set(transcript_nodes(trajectory)), segment_causes(trajectory)
    numbers = {at: number for number, at in enumerate(trajectory.acted(), 1)}
    starts = sorted(causes)
    turns: list[Turn] = []
    # Of each node: the sampled nodes, the segments and the length of the context up to it.
    known: list[tuple[int, int, int]] = []
    for index, node in enumerate(trajectory.nodes):
        sampled, segments, context = known[node.parent] if node.parent is not None else (0, 0, 0)
        sampled += node.sampled
        lengths: dict[str, Any] = {}
        if (tokens := node.tokens) is not None:
            segments += not (tokens.extends and segments)
            new = {"prompt_tokens": len(tokens.prompt_ids), "sampled_tokens": len(tokens.sampled_ids)}
            context = (context if tokens.extends else 0) + sum(new.values())
            segment = bisect_right(starts, index) if index in numbers else segments
            lengths = {**new, "context_tokens": context, "segment": segment}
        known.append((sampled, segments, context))
        # A strategy's notes. Those of a plugin may have any form.
        notes = node.metadata.get("search")
        turns.append(
            Turn(
                **dict(node),
                **lengths,
                node=index,
                acted=index in executed,
                turn=numbers.get(index, sampled) if node.sampled else None,
                segment_cause=causes.get(index),
                kind=kind_of(node),
                search=notes if isinstance(notes, dict) else {},
                temperature=node.sampling and node.sampling.temperature,
                lacks=tuple(causes_of(node.metadata)),
            )
        )
    return tuple(turns)


def totals_of(trajectory: Trajectory, turns: Sequence[Turn]) -> dict[str, Any]:
    """Sums over the acted path; ``nodes`` counts the whole tree. ``seconds`` is the wall time of the episode.

    ``episode_return`` is ``None`` for a failed episode, and for one in which no step was rewarded.
    """
    sampled = [turn for turn in turns if turn.acted and turn.turn is not None]
    return {
        "nodes": len(turns),
        "turns": len(sampled),
        "segments": max((turn.segment or 0 for turn in sampled), default=0),
        "prompt_tokens": sum(turn.prompt_tokens or 0 for turn in sampled),
        "sampled_tokens": sum(turn.sampled_tokens or 0 for turn in sampled),
        "episode_return": trajectory.known_return,
        "seconds": max(0.0, trajectory.times.finished - trajectory.times.started),
    }


_SHOWN = {"id", "run_id", "group_id", "task", "policy", "stop", "failure", "usage"}


def as_json(trajectory: Trajectory, scores: Sequence[Score], labels: Sequence[Label]) -> dict[str, Any]:
    """The episode without token ids and evidence. ``prompt``: what ``[rl.workspace] prompt`` gave the agent."""
    turns = turns_of(trajectory)
    return {
        **trajectory.model_dump(include=_SHOWN),
        "strategy": trajectory.strategy.name,
        "prompt": prompt_of(trajectory),
        "scores": scores,
        "labels": labels,
        "turns": turns,
        "totals": totals_of(trajectory, turns),
    }


_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "magenta"}
_LINE_WIDTH = 70


def print_episode(
    console: Console,
    trajectory: Trajectory,
    scores: Sequence[Score],
    labels: Sequence[Label],
    *,
    tree: bool = False,
    full: bool = False,
) -> None:
    """Print the acted path: each message, and below it its cost and reward. ``full``: messages are not shortened.

    ``tree``: every node in a line, deeper where the tree branches; ``●`` marks the acted path.
    """

    def write(text: str, style: str = "") -> None:
        console.print(Text(visible(text), style), soft_wrap=True)

    turns, task, prompt = turns_of(trajectory), trajectory.task, prompt_of(trajectory)
    write(f"{trajectory.id}  run {trajectory.run_id}  task {task.environment}/{task.id}", "bold")
    named = "" if prompt == STANDARD_PROMPT else f"  prompt {prompt}"
    write(f"{trajectory.strategy.name}  {trajectory.policy.served_name}{named}")
    if (link := sub_agent_of(task)) is not None:
        write(f"sub-agent {link.kind} of {link.parent}")
    console.print()
    segment = 1
    for turn, depth in _in_depth(turns) if tree else ((turn, 0) for turn in turns if turn.acted):
        text = message_text(turn.message)
        if tree:
            line = f"{'●' if turn.acted else '○'} {_heading(turn)}  {one_line(text, _LINE_WIDTH)}"
            write(f"{'  ' * depth}{line}", "bold" if turn.acted else "dim")
        else:
            if turn.segment is not None and turn.segment != segment:
                segment = turn.segment
                why = f" ({turn.segment_cause})" if turn.segment_cause else ""
                write(f"── segment {segment}: this prompt does not extend the turn before{why} ──", "yellow")
            write(_heading(turn).rstrip(), f"bold {_STYLES[turn.message.role]}")
        if isinstance(report := turn.search.get("report"), dict):
            known = (f"{name.replace('_', ' ')} {_entry(entry)}" for name, entry in report.items() if entry is not None)
            write(f"{'  ' * (depth + 1)}search: {'; '.join(known)}", "yellow")
        for line in () if tree else (text if full else shortened(text)).split("\n"):
            write(f"  {line}")
    console.print()
    totals = totals_of(trajectory, turns)
    ended = f"{trajectory.stop.value} after {counted(totals['turns'], 'turn')} and {totals['seconds']:.1f} s"
    write(f"{ended}, return {number(totals['episode_return'])}", "bold")
    tokens = f"{totals['prompt_tokens']:,} prompt and {totals['sampled_tokens']:,} sampled tokens"
    write(f"{tokens} in {counted(totals['segments'], 'segment')}; {counted(totals['nodes'], 'node')}")
    if aside := sum(turn.turn is not None and not turn.acted for turn in turns):
        write(f"{counted(aside, 'more turn')} on other branches: see --tree")
    for score in scores:
        write(f"score {number(score.reward)} by {score.reward_version}")
    for label in standing(labels):
        tokens = "" if label.tokens is None else f", sampled tokens {label.tokens[0]} to {label.tokens[1] - 1}"
        parts = (
            label.kind.value,
            None if label.value is None else number(label.value),
            label.other and f"over {label.other}",
            None if label.node is None else f"on node {label.node}{tokens}",
            label.author and f"by {label.author}",
        )
        write(": ".join(filter(None, (" ".join(filter(None, parts)), label.text))))
    if (failure := trajectory.failure) is not None:
        write(f"failed ({failure.kind.value}, {failure.boundary}): {failure.message}", "red")


def _entry(entry: JsonValue) -> str:
    if isinstance(entry, dict):
        return ", ".join(f"{_entry(count)} {what}" for what, count in entry.items())
    return number(entry) if isinstance(entry, int | float) else str(entry)


def _heading(turn: Turn) -> str:
    kind = f" {turn.kind}" if turn.kind != TURN else ""
    name = f"#{turn.node} {turn.message.role}{kind}" + (f" turn {turn.turn}" if turn.turn is not None else "")
    new = f"+{turn.prompt_tokens or 0:,} prompt, {turn.sampled_tokens or 0:,} sampled"
    merged, dropped = turn.search.get("merged"), turn.search.get("dropped")
    parts = (
        f"{new} of {turn.context_tokens:,} tokens" if turn.context_tokens is not None else None,
        "no token ids" if turn.context_tokens is None and turn.turn is not None and not turn.lacks else None,
        *turn.lacks,
        None if turn.reward is None else f"{'simulated ' if turn.simulated else ''}reward {number(turn.reward)}",
        None if turn.value is None else f"value {number(turn.value)}",
        f"{turn.visits} visits" if turn.visits else None,
        f"{merged} merged" if merged else None,
        f"dropped: {one_line(str(dropped), _LINE_WIDTH)}" if dropped else None,
        None if turn.temperature is None else f"temperature {number(turn.temperature)}",
        None if turn.policy is None else turn.policy.served_name,
        None if turn.finish_reason in {None, "stop", "tool_calls"} else f"ended by {turn.finish_reason}",
    )
    return f"{name}  {' · '.join(filter(None, parts))}"


def message_text(message: Message) -> str:
    """The text of a message, and its tool calls."""
    calls = (f"→ {call.name}({call.arguments})" for call in message.tool_calls)
    return "\n".join([*filter(None, [message.content]), *calls])


def shortened(text: str, lines: int = 12, characters: int = 1200) -> str:
    """The beginning of a long text, with a line that says how much there is."""
    shown = "\n".join(text[:characters].split("\n")[:lines])
    if shown == text:
        return text
    return f"{shown}\n… cut: {len(text):,} characters in all; `openhands-rl show --full` shows them"


def _in_depth(turns: Sequence[Turn]) -> Iterator[tuple[Turn, int]]:
    """Every node below its parent, with the number of places above it where the tree branches."""
    children: dict[int | None, list[Turn]] = {}
    for turn in turns:
        children.setdefault(turn.parent, []).append(turn)
    waiting = [(turn, 0) for turn in reversed(children.get(None, []))]
    while waiting:
        turn, depth = waiting.pop()
        yield turn, depth
        below = children.get(turn.node, [])
        waiting += ((child, depth + (len(below) > 1)) for child in reversed(below))
