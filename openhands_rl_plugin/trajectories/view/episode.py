"""One stored episode for display: its turns, its segments and their totals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.messages import transcript_nodes
from openhands_rl_plugin.core.protocols import TakesLabels, TrajectoryStorage
from openhands_rl_plugin.core.records import STANDARD_PROMPT, Label, TrajectoryFilter, prompt_of
from openhands_rl_plugin.core.types import (
    TURN,
    Failure,
    Frozen,
    JsonObject,
    Message,
    PolicyRef,
    Score,
    StopReason,
    Task,
    Trajectory,
    Usage,
    kind_of,
)
from openhands_rl_plugin.trajectories.drift import segment_causes
from openhands_rl_plugin.trajectories.view.figures import causes_of

MOST_NAMED = 10
"""How many of the ids that match a prefix are listed."""


class Turn(Frozen):
    """One node. ``prompt_tokens`` is what this turn added, ``context_tokens`` the length of all that the model saw.

    ``turn`` counts the sampled nodes above and ``segment`` the runs of turns that extend each other, both from 1; they
    are ``None`` where nothing was sampled, and ``segment`` also where there are no token ids. ``segment_cause``: why
    one begins here. ``kind``: a message of the episode, or of what was asked beside it, such as a condensation.

    What search knows: ``simulated``, the reward is that of a fork's step; ``merged``, so many equal answers were taken
    for this one; ``dropped``, why the branch was given up; ``search_report``, on the answer that a search decided for,
    what it spent. ``temperature`` is the one that the answer was sampled at, ``lacks`` what training misses
    in it, and why.
    """

    node: int
    parent: int | None
    acted: bool
    message: Message
    turn: int | None = None
    segment: int | None = None
    reward: float | None = None
    value: float | None = None
    visits: int = 0
    simulated: bool = False
    segment_cause: str | None = None
    kind: str = TURN
    merged: int = 0
    dropped: str | None = None
    search_report: JsonObject | None = None
    temperature: float | None = None
    policy: PolicyRef | None = None
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None
    context_tokens: int | None = None
    finish_reason: str | None = None
    lacks: tuple[str, ...] = ()


class Totals(Frozen):
    """Sums over the acted path; ``nodes`` counts the whole tree. ``seconds`` is the wall time of the episode.

    ``episode_return`` is ``None`` for a failed episode, and for one in which no step was rewarded.
    """

    nodes: int
    turns: int
    segments: int
    prompt_tokens: int
    sampled_tokens: int
    episode_return: float | None
    seconds: float


class Episode(Frozen):
    """An episode, its scores, its labels and its turns: every node of the tree, in the order of their making.

    ``prompt``: what ``[rl.workspace] prompt`` gave the agent.
    """

    id: str
    run_id: str
    group_id: str
    task: Task
    strategy: str
    prompt: str = STANDARD_PROMPT
    policy: PolicyRef
    stop: StopReason
    failure: Failure | None
    scores: tuple[Score, ...]
    labels: tuple[Label, ...] = ()
    turns: tuple[Turn, ...]
    totals: Totals
    usage: Usage

    @property
    def acted(self) -> tuple[Turn, ...]:
        """The turns of the path that was acted on."""
        return tuple(turn for turn in self.turns if turn.acted)


async def find_episode(storage: TrajectoryStorage, beginning: str) -> Episode:
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
    async for trajectory, scores in storage.find(TrajectoryFilter(ids=tuple(ids), finished=None)):
        labels = await storage.labels(ids) if isinstance(storage, TakesLabels) else ()
        return view_of(trajectory, scores, labels)
    raise StorageError(f"no episode has an id that begins with {beginning!r}; `openhands-rl list` lists them")


def view_of(trajectory: Trajectory, scores: Sequence[Score] = (), labels: Sequence[Label] = ()) -> Episode:
    """The view of a trajectory."""
    turns = _turns(trajectory)
    sampled = [turn for turn in turns if turn.acted and turn.turn is not None]
    own = ("id", "run_id", "group_id", "task", "policy", "stop", "failure", "usage")
    return Episode(
        **{name: getattr(trajectory, name) for name in own},
        strategy=trajectory.strategy.name,
        prompt=prompt_of(trajectory),
        scores=tuple(scores),
        labels=tuple(labels),
        turns=turns,
        totals=Totals(
            nodes=len(turns),
            turns=len(sampled),
            segments=max((turn.segment or 0 for turn in sampled), default=0),
            prompt_tokens=sum(turn.prompt_tokens or 0 for turn in sampled),
            sampled_tokens=sum(turn.sampled_tokens or 0 for turn in sampled),
            episode_return=trajectory.known_return,
            seconds=max(0.0, trajectory.times.finished - trajectory.times.started),
        ),
    )


def _turns(trajectory: Trajectory) -> tuple[Turn, ...]:
    executed, causes = set(transcript_nodes(trajectory)), segment_causes(trajectory)
    numbers = {at: number for number, at in enumerate(trajectory.acted(), 1)}
    starts = sorted(causes)
    own = ("parent", "message", "reward", "value", "visits", "simulated", "policy", "finish_reason")
    turns: list[Turn] = []
    # Of each node: the sampled nodes, the segments and the length of the context up to it.
    counted: list[tuple[int, int, int]] = []
    for index, node in enumerate(trajectory.nodes):
        sampled, segments, context = counted[node.parent] if node.parent is not None else (0, 0, 0)
        sampled += node.sampled
        lengths: dict[str, Any] = {}
        if (tokens := node.tokens) is not None:
            segments += not (tokens.extends and segments)
            new = {"prompt_tokens": len(tokens.prompt_ids), "sampled_tokens": len(tokens.sampled_ids)}
            context = (context if tokens.extends else 0) + sum(new.values())
            segment = bisect_right(starts, index) if index in numbers else segments
            lengths = {**new, "context_tokens": context, "segment": segment}
        counted.append((sampled, segments, context))
        # A strategy's notes. Those of a plugin may have any form.
        held = node.metadata.get("search")
        notes = held if isinstance(held, dict) else {}
        merged, dropped, report = notes.get("merged"), notes.get("dropped"), notes.get("report")
        turns.append(
            Turn(
                **{name: getattr(node, name) for name in own},
                **lengths,
                node=index,
                acted=index in executed,
                turn=numbers.get(index, sampled) if node.sampled else None,
                segment_cause=causes.get(index),
                kind=kind_of(node),
                merged=merged if isinstance(merged, int) else 0,
                dropped=dropped if isinstance(dropped, str) else None,
                search_report=report if isinstance(report, dict) else None,
                temperature=node.sampling.temperature if node.sampling is not None else None,
                lacks=tuple(causes_of(node.metadata)),
            )
        )
    return tuple(turns)
