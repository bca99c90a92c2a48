"""The last gate before a store: nothing is written with a secret in it, whoever hands it over."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from openhands_rl_plugin.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.redaction import redact_nodes, redact_trajectory, redact_value
from openhands_rl_plugin.types import Node, Score, Trajectory

# Episodes without any secret are not remembered, so that this is far more than are open at a time.
_MOST_OPEN = 10_000
_ALL = frozenset((-1,))  # No node has this index: every node is tainted.


class SecretGuard:
    """Redacts what a storage is given. Remembers which nodes of open episodes held a secret, because the token ids of
    those below them spell it. May be used from several threads.
    """

    def __init__(self) -> None:
        self._tainted: OrderedDict[str, frozenset[int]] = OrderedDict()
        self._lock = threading.Lock()

    def trajectory(self, trajectory: Trajectory) -> Trajectory:
        """A whole episode."""
        self._forget(trajectory.id)
        return redact_trajectory(trajectory)

    def start(self, start: EpisodeStart) -> EpisodeStart:
        """A secret in the description of a tool is a part of every prompt, so that it taints the whole episode."""
        clean = redact_value(start)
        if clean.tools != start.tools:
            self._remember(start.id, _ALL)
        return clean

    def growth(self, growth: EpisodeGrowth) -> EpisodeGrowth:
        """Appended nodes."""
        known = self._tainted.get(growth.trajectory_id, frozenset())
        nodes, tainted = redact_nodes(growth.nodes, first=growth.first, tainted=known)
        if known >= _ALL:
            nodes = tuple(_without_tokens(node) for node in nodes)
        if tainted == known == frozenset():
            return growth
        self._remember(growth.trajectory_id, tainted)
        return growth.model_copy(update={"nodes": nodes})

    def end(self, end: EpisodeEnd) -> EpisodeEnd:
        """How an episode ended; it grows no more."""
        self._forget(end.trajectory_id)
        return redact_value(end)

    def scores(self, scores: Sequence[Score]) -> tuple[Score, ...]:
        """Judgements, whose details may quote the episode."""
        return tuple(redact_value(score) for score in scores)

    def _remember(self, trajectory_id: str, tainted: frozenset[int]) -> None:
        with self._lock:
            self._tainted[trajectory_id] = tainted
            if len(self._tainted) > _MOST_OPEN:
                self._tainted.popitem(last=False)

    def _forget(self, trajectory_id: str) -> None:
        with self._lock:
            self._tainted.pop(trajectory_id, None)


def _without_tokens(node: Node) -> Node:
    return node if node.tokens is None else node.model_copy(update={"tokens": None})
