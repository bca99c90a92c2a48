"""Which request of the host a conversation goes on from: an agent's model is sent the host's own form of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Message


class RequestedTurn(Protocol):
    """A request that a host would send; ``path`` is its conversation in the tree."""

    @property
    def path(self) -> tuple[Message, ...]: ...


class KnownTurns[T: RequestedTurn]:
    """The live turn, and those that forks of it have reached."""

    def __init__(self) -> None:
        self._turns: dict[tuple[Message, ...], T] = {}

    def open(self, turn: T) -> None:
        """Begin a turn; others are forgotten unless their conversations go on from it."""
        start = len(turn.path)
        self._turns = {path: known for path, known in self._turns.items() if path[:start] == turn.path}
        self.expect(turn)

    def expect(self, turn: T) -> None:
        """Until the next turn is opened, conversations that begin with ``turn.path`` go on from ``turn``."""
        self._turns[turn.path] = turn

    def longest(self, messages: Sequence[Message]) -> T | None:
        """The turn with the longest path that ``messages`` begin with, if there is one."""
        said = tuple(messages)
        lengths = {len(path) for path in self._turns}
        prefixes = (said[:length] for length in sorted(lengths, reverse=True) if length <= len(said))
        return next((self._turns[prefix] for prefix in prefixes if prefix in self._turns), None)


def sampled_below_head(tree: EpisodeTree) -> Iterator[Message]:
    """The answers that can still be executed."""
    pending = list(tree.children(tree.head))
    while pending:
        index = pending.pop()
        pending += tree.children(index)
        if tree.nodes[index].sampled:
            yield tree.nodes[index].message
