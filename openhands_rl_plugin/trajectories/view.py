"""Views of a store for people: lists and figures of episodes, and one episode, on a terminal.

Reads only; needs no plugin.

Control sequences in texts of a model or a tool are escaped. Progress bars go to stderr, if it is a terminal.
"""

from __future__ import annotations

import json
import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import Field
from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.judgements import OPINIONS, named_score, opinions, standing
from openhands_rl_plugin.core.messages import counted, one_line, transcript_nodes, visible
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import (
    MISSING,
    Label,
    TrajectoryFilter,
    TrajectoryOrder,
    TrajectorySummary,
    prompt_of,
    sub_agent_of,
)
from openhands_rl_plugin.core.redaction import is_redacted
from openhands_rl_plugin.core.statistics import Estimate, paired_difference, wilson
from openhands_rl_plugin.core.types import (
    TURN,
    JsonObject,
    Message,
    Node,
    Score,
    StopReason,
    Tokens,
    Trajectory,
    kind_of,
)
from openhands_rl_plugin.trajectories.drift import segment_causes

# --- The terminal

_WIDTH_OF_FILES = 200


def console() -> Console:
    """The console of all commands: colours and wrapped lines only on a terminal."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)


def print_json(value: Any) -> None:
    """Print values as JSON of ASCII characters, which no terminal acts upon."""
    print(json.dumps(to_jsonable_python(value, inf_nan_mode="strings"), indent=1))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> Table:
    """A plain table; the columns in ``numbers`` are aligned to the right. Cells are taken literally."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(Text(column), justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(visible(cell)) for cell in row))
    return made


def number(value: float | None) -> str:
    """Three significant places; ``-`` for what is not known, which is not zero."""
    return "-" if value is None else f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"


class ProgressBar:
    """One bar with its times."""

    def __init__(self, progress: Progress, what: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=total, note="")

    def update(self, done: int, total: int | None = None, *, what: str | None = None, note: str | None = None) -> None:
        """Move the bar to ``done``. ``what`` is the text before it, ``note`` the one after it."""
        self._progress.update(self._task, completed=done, total=total, description=what, note=note or "")

    def advance(self) -> None:
        """Move the bar by one."""
        self.update(int(self._progress.tasks[0].completed) + 1)

    def print(self, line: str) -> None:
        """Print a line above the bar, on a terminal or not."""
        self._progress.console.print(visible(line), highlight=False, soft_wrap=True, markup=False)


@contextmanager
def progress_bar(what: str, total: int | None = None, *, shown: bool = True) -> Iterator[ProgressBar]:
    """A bar until the block ends. ``total``: steps; ``None`` when not known yet."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        yield ProgressBar(progress, what, total)


# --- Figures and lists

REMEDY = (
    "training with rewards needs token ids and logprobs: serve the model with vLLM or `openhands-rl serve`, and let "
    "the agent use /v1/chat/completions"
)
_NAMES = {"token_ids": "token ids"}


class Notes(NamedTuple):
    """Facts of an episode for the figures, in addition to its summary.

    ``gaps``: what its completions lack for training, by cause; the number of segments; scores of people and verifiers.
    """

    gaps: Counter[str]
    segments: int
    opinions: Mapping[str, float]


async def notes_in(storage: TrajectoryStorage, where: TrajectoryFilter) -> dict[str, Notes]:
    """Id -> the notes. Reads nodes only of episodes with missing data or several segments, by the columns.

    Several segments may come from completions that a search did not choose.
    """
    columns = await storage.columns(where)
    scores, rows = await storage.scores(columns.ids), [*zip(columns.ids, columns.segments, columns.whole, strict=True)]
    notes = {each: Notes(Counter(), segments, opinions(scores.get(each, ()))) for each, segments, _ in rows}
    rest = TrajectoryFilter(ids=tuple(each for each, count, whole in rows if not whole or count > 1), finished=None)
    async for each, known in storage.find(rest):
        judged = opinions(known) if each.failure is None else {}
        notes[each.id] = Notes(Counter(chain(*lacks_of(each).values())), len(segment_causes(each)), judged)
    return notes


def lacks_of(trajectory: Trajectory) -> dict[int, tuple[str, ...]]:
    """Sampled node -> what it lacks for training, and why; only for nodes that lack something."""
    lacks: dict[int, tuple[str, ...]] = {}
    with_secret: set[int] = set()
    for index, node in enumerate(trajectory.nodes):
        if node.parent in with_secret or is_redacted(node.message):
            with_secret.add(index)
        missing = node.metadata.get(MISSING)
        named = missing.items() if isinstance(missing, dict) else ()
        causes = [f"no {_NAMES.get(what, what)}: {why}" for what, why in named]
        if node.sampled and node.tokens is None and not causes:
            causes = ["no token ids: dropped with a secret" if index in with_secret else "no token ids"]
        if unknown := str(node.metadata.get("unknown_before") or ""):
            causes.append(f"not recorded whole: {unknown}")
        if node.sampled and causes:
            lacks[index] = tuple(causes)
    return lacks


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
    ``segments``: how many there are. ``opinions``: means of what people and verifiers say, which
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
                "segments": sum(each.segments for each in noted),
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
    return paired_difference([0.0] * len(values), values, resamples=max(200, min(2000, 600_000 // (len(values) or 1))))


async def rewarded_by(
    storage: TrajectoryStorage, where: TrajectoryFilter, reward: str
) -> AsyncIterator[TrajectorySummary]:
    """Yield the matches of ``where``, with the newest score of ``reward`` as the reward of each episode.

    Bounds and the order of rewards use these scores. The summaries have no return, which is another reward. It
    reads the scores of all episodes that match the other conditions; ``where`` has no page. Raises ``StorageError``.
    """
    by_reward = where.sort is TrajectoryOrder.REWARD
    stored = {"sort": TrajectoryOrder.STORED, "descending": False} if by_reward else {}
    summaries = [each async for each in storage.summaries(without_rewards(where).model_copy(update=stored))]
    scores = await storage.scores([each.id for each in summaries])
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


async def page_of(
    storage: TrajectoryStorage, where: TrajectoryFilter, reward: str | None = None
) -> tuple[list[TrajectorySummary], int]:
    """The page of ``where``, by the scores of ``reward`` if it is set, and the count of all matches."""
    if reward is None:
        return [each async for each in storage.summaries(where)], await storage.count(where)
    whole = where.model_copy(update={"limit": None})
    found = [each async for each in rewarded_by(storage, whole, reward)]
    return found[: where.limit], len(found)


def without_rewards(where: TrajectoryFilter) -> TrajectoryFilter:
    """``where`` without bounds and order of rewards."""
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
    """Local date and time; imported episodes may have none (0), or an invalid one."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g} s"


def _interval(estimate: Estimate | None) -> str:
    if estimate is None or not estimate.n:
        return "-"
    return f"{number(estimate.mean)} [{number(estimate.low)}, {number(estimate.high)}]"


# --- One episode


class Turn(Node):
    """A node and its place in the episode. ``prompt_tokens`` is what this turn added, ``context_tokens`` the length of
    all that the model saw.

    ``turn`` counts the sampled nodes above and ``segment`` the runs of turns that extend each other, both from 1; they
    are ``None`` where nothing was sampled, and ``segment`` also where there are no token ids. ``segment_cause``: why
    one begins here. ``kind``: a turn, or a side request such as a condensation.

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
            more = f"give more of it: {', '.join(ids[:10])}"
            raise StorageError(f"{len(ids)} episodes have an id that begins with {beginning!r}; {more}")
    async for found in storage.find(TrajectoryFilter(ids=tuple(ids), finished=None)):
        return found
    raise StorageError(f"no episode has an id that begins with {beginning!r}; `openhands-rl list` lists them")


def turns_of(trajectory: Trajectory) -> tuple[Turn, ...]:
    """Every node of the tree, in the order of their making."""
    executed, causes, lacks = set(transcript_nodes(trajectory)), segment_causes(trajectory), lacks_of(trajectory)
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
                temperature=None if node.sampling is None else node.sampling.temperature,
                lacks=lacks.get(index, ()),
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
    write(f"{trajectory.strategy.name}  {trajectory.policy.served_name}  prompt {prompt}")
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
            write(f"{'  ' * (depth + 1)}search: {json.dumps(report)}", "yellow")
        for line in () if tree else (text if full else shortened(text)).split("\n"):
            write(f"  {line}")
    console.print()
    totals = totals_of(trajectory, turns)
    ended = f"{trajectory.stop.value} after {counted(totals['turns'], 'turn')} and {totals['seconds']:.1f} s"
    write(f"{ended}, return {number(totals['episode_return'])}", "bold")
    tokens = f"{totals['prompt_tokens']:,} prompt and {totals['sampled_tokens']:,} sampled tokens"
    write(f"{tokens} in {counted(totals['segments'], 'segment')}; {counted(totals['nodes'], 'node')}")
    for score in scores:
        write(f"score {number(score.reward)} by {score.reward_version}")
    for label in standing(labels):
        value = None if label.value is None else number(label.value)
        about = label.kind.value, value, label.other and f"over {label.other}", label.author and f"by {label.author}"
        write(": ".join(filter(None, (" ".join(filter(None, about)), label.text))))
    if (failure := trajectory.failure) is not None:
        write(f"failed ({failure.kind.value}, {failure.boundary}): {failure.message}", "red")


def _heading(turn: Turn) -> str:
    kind = f" {turn.kind}" if turn.kind != TURN else ""
    name = f"#{turn.node} {turn.message.role}{kind}" + (f" turn {turn.turn}" if turn.turn is not None else "")
    new = f"+{turn.prompt_tokens or 0:,} prompt, {turn.sampled_tokens or 0:,} sampled"
    merged, dropped = turn.search.get("merged"), turn.search.get("dropped")
    parts = (
        f"{new} of {turn.context_tokens:,} tokens" if turn.context_tokens is not None else None,
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


def print_drift(out: Console, report: Mapping[str, Any]) -> None:
    """Print the causes in a table, the costliest first, then the setting against each, with examples."""
    found = "{episodes:,} episodes, {turns:,} turns with token ids in {segments:,} segments".format_map(report)
    tokens = "{tokens:,} tokens, {sampled_tokens:,} of them sampled".format_map(report)
    out.print(Text(f"{found} ({report['segments_by_drift']:,} because of drift): {tokens}"))
    if not report["causes"]:
        none = "nothing to compare: `openhands-rl list STORE --by` says why turns have no token ids"
        out.print(Text("every turn extends the one before", "green") if report["turns"] else Text(none, "yellow"))
        return
    columns, rows = ("cause", "breaks", "episodes", "tokens again", "of all"), []
    for each in report["causes"]:
        again = each["repeated_tokens"]
        counts = f"{each['breaks']:,}", f"{each['episodes']:,}", f"{again:,}", f"{again / report['tokens']:.0%}"
        rows.append((each["cause"], *counts))
    out.print(table(columns, rows, numbers=columns[1:]))
    for each in report["causes"]:
        out.print(Text(f"\n{each['cause']}", "bold"))
        out.print(Text(f"  set: {each['setting']}"), soft_wrap=True)
        for example in each["examples"]:
            out.print(Text(visible(f"  see: {example}"), "dim"), soft_wrap=True)
