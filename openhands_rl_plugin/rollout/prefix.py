"""Episodes that begin with a prefix: the first turns of another episode, replayed in the environment.

Prefix sampling (Zhu et al. 2026, arXiv 2605.05112) moves groups whose rewards would all be equal towards a success rate
of one half: a task that always fails begins from a part of a success, one that is always solved from a part of a
failure. The replayed answers are context: no loss, no credit. A request carries the path to replay, and a host runs it
with the strategy of this module around its own, so that every host replays in the same way: each action is executed,
and what the environment answers must be what is recorded. Where it differs, the episode ends with a failure of the
boundary ``DIFFERED``, and ``plain_start`` is what to run in its place.
"""

from __future__ import annotations

import re
from typing import Protocol, runtime_checkable

from openhands_rl_plugin.core.acted import PREFIX, is_replayed
from openhands_rl_plugin.core.errors import CaughtFailure, EpisodeError
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine, Strategy
from openhands_rl_plugin.core.records import PrefixNote
from openhands_rl_plugin.core.redaction import is_redacted
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    FailureKind,
    Message,
    Node,
    StopReason,
    Trajectory,
)

DIFFERED = "prefix.replay"
"""The boundary of the failure of an episode whose environment did not answer as in the prefix."""

_DURATION = re.compile(r"\d+(\.\d+)? ?(ms|seconds?|s)\b")
"""How long a command took is the only part of a test runner's output that differs from run to run."""


@runtime_checkable
class ReadsAnswers(Protocol):
    """An engine of a host that executes only answers that it has read itself."""

    def read_again(self, answer: Message) -> None:
        """Make a recorded answer executable. Raises ``ModelError`` where the host cannot read it."""
        ...


def can_begin_others(trajectory: Trajectory) -> bool:
    """Whether a part of the episode can be replayed: two turns or more on one path, all of them as they were said."""
    sampled = tuple(at for at in trajectory.path() if trajectory.nodes[at].sampled)
    ended = trajectory.failure is None and trajectory.stop not in (StopReason.UNFINISHED, StopReason.TIMEOUT)
    one_path = len(sampled) > 1 and sampled == trajectory.acted()
    return ended and one_path and not any(map(is_redacted, trajectory.messages()))


def prefix_nodes(source: Trajectory, turns: int, *, good: bool) -> tuple[Node, ...]:
    """The path of ``source`` up to its answer after the first ``turns``, without token ids: nobody trains on it here.

    Raises ``ValueError`` unless that leaves a turn.
    """
    if turns < 1:
        raise ValueError(f"{turns} turns are no prefix")
    return path_before(source, turns, good=good)


def path_before(source: Trajectory, turns: int, *, good: bool) -> tuple[Node, ...]:
    """``prefix_nodes``, also of no turns: then it is the prompt of the first one."""
    path = source.path()
    sampled = [number for number, at in enumerate(path) if source.nodes[at].sampled]
    if not 0 <= turns < len(sampled):
        raise ValueError(f"{turns} turns of {len(sampled)} are no prefix")
    note = PrefixNote(trajectory=source.id, turns=max(turns, 1), of=len(sampled), good=good).model_dump()
    return tuple(
        Node(
            parent=number - 1 if number else None,
            message=source.nodes[at].message,
            sampled=source.nodes[at].sampled,
            metadata={PREFIX: note} if source.nodes[at].sampled else {},
        )
        for number, at in enumerate(path[: sampled[turns]])
    )


def begun_with(request: EpisodeRequest, prefix: tuple[Node, ...]) -> EpisodeRequest:
    """The request with the prefix, in a group of its own: only episodes with one beginning are compared."""
    note = next((PrefixNote.model_validate(node.metadata[PREFIX]) for node in prefix if is_replayed(node)), None)
    if note is None:
        return request
    group = f"{request.group_id}@{note.trajectory}+{note.turns}"
    return request.model_copy(update={"prefix": prefix, "group_id": group})


def plain_start(request: EpisodeRequest) -> EpisodeRequest:
    """The request without its prefix, in the group of those without one."""
    if not request.prefix:
        return request
    group = request.group_id.rpartition("@")[0]
    return request.model_copy(update={"prefix": (), "group_id": group, "attempt": 0})


def beginning_of(group_id: str, plain: str) -> tuple[str, int] | None:
    """Episode and turns of the prefix that a group of ``begun_with`` has, where ``plain`` is its id without one."""
    named = group_id.removeprefix(f"{plain}@").rpartition("+") if group_id.startswith(f"{plain}@") else ("", "", "")
    return (named[0], int(named[2])) if named[0] and named[2].isdigit() else None


def has_differed(trajectory: Trajectory) -> bool:
    """Whether the episode ended because its environment did not answer as in its prefix."""
    return trajectory.failure is not None and trajectory.failure.boundary == DIFFERED


def after_prefix(strategy: Strategy, prefix: tuple[Node, ...]) -> Strategy:
    """A strategy that replays the prefix before ``strategy`` decides; ``strategy`` itself where there is none."""
    return PrefixStrategy(strategy, prefix) if prefix else strategy


class PrefixStrategy:
    """Commits the answers of a prefix one after the other, then leaves the decisions to another strategy."""

    def __init__(self, strategy: Strategy, prefix: tuple[Node, ...]) -> None:
        self._strategy = strategy
        self._prefix = prefix
        self._turns = sum(node.sampled for node in prefix)
        self._replayed = False

    @property
    def forks(self) -> int:
        """The forks that the other strategy holds at a time."""
        return getattr(self._strategy, "forks", 0)

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """The next answer of the prefix, or what the strategy decides.

        Raises ``CaughtFailure`` with the boundary ``DIFFERED`` where the episode is not what the prefix says.
        """
        if not self._replayed and tree.turns <= self._turns:
            self._compare(tree)
            if tree.turns < self._turns:
                return self._next(tree, engine)
        # A host may shorten the history later: then there are fewer turns on the path again.
        self._replayed = True
        return await self._strategy.decide(tree, engine, world)

    def _next(self, tree: EpisodeTree, engine: LLMEngine) -> int:
        node = self._prefix[len(tree.path())]
        if isinstance(engine, ReadsAnswers):
            try:
                engine.read_again(node.message)
            except EpisodeError as error:
                raise _differed(f"the host cannot execute an answer of the replayed prefix: {error}") from error
        return tree.propose(Completion(message=node.message, metadata=node.metadata))

    def _compare(self, tree: EpisodeTree) -> None:
        said = tree.messages()[: len(self._prefix)]
        recorded = [node.message for node in self._prefix[: len(said)]]
        other = next((at for at, both in enumerate(zip(said, recorded, strict=True)) if not _same(*both)), None)
        if other is not None:
            was, now = (_told(message) for message in (recorded[other], said[other]))
            raise _differed(f"message {other} of the replayed prefix was {was!r} and is {now!r}")
        follows = self._prefix[len(said)].sampled if len(said) < len(self._prefix) else tree.turns == self._turns
        if not follows:
            raise _differed(f"after message {len(said) - 1} the replayed prefix has another one")


def _differed(message: str) -> CaughtFailure:
    return CaughtFailure(Failure(kind=FailureKind.ENVIRONMENT, message=message, boundary=DIFFERED))


def _same(one: Message, other: Message) -> bool:
    if one == other:
        return True
    return timeless(one) == timeless(other)


def timeless(message: Message) -> Message:
    """The message with every duration in it set to 0."""
    return message.model_copy(update={"content": _DURATION.sub("0 s", message.content or "")})


def _told(message: Message) -> str:
    return f"{message.role}: {message.content or ''}"[:160]
