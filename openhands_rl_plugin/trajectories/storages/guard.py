"""The last gate before a store: no record is written with a secret in it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart, Label
from openhands_rl_plugin.core.redaction import REDACTED, redact_nodes, redact_trajectory, redact_value
from openhands_rl_plugin.core.types import Node, Score, Trajectory

# Far more than are open at a time. What is forgotten is read again when its episode grows.
_MOST_OPEN = 10_000
_ALL = frozenset((-1,))  # No node has this index: every node is tainted.


class _Seen(NamedTuple):
    """The nodes of an open episode that went by: how many, and which of them are tainted."""

    nodes: int = 0
    tainted: frozenset[int] = frozenset()


class SecretGuard:
    """Redacts what a storage is given. Remembers which nodes of open episodes held a secret, because the token ids of
    those below them spell it. May be used from several threads.

    A storage calls ``knows`` before it appends, and ``recall`` with the stored part of an episode of another process.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._lock = threading.Lock()

    def trajectory(self, trajectory: Trajectory) -> Trajectory:
        """A whole episode."""
        self._forget(trajectory.id)
        return redact_trajectory(trajectory)

    def start(self, start: EpisodeStart) -> EpisodeStart:
        """A secret in the description of a tool is a part of every prompt, so that it taints the whole episode."""
        clean = redact_value(start)
        if clean.tools != start.tools:
            self._remember(start.id, _Seen(tainted=_ALL))
        elif start.id not in self._seen:
            self._remember(start.id, _Seen())
        return clean

    def knows(self, growth: EpisodeGrowth) -> bool:
        """Whether all nodes before those of ``growth`` went by here."""
        seen = self._seen.get(growth.trajectory_id)
        return seen is not None and growth.first <= seen.nodes

    def recall(self, stored: Trajectory) -> None:
        """Learn from an open episode what held a secret when it was stored: the text says so, and no ids are left."""
        clean = {above for at, node in enumerate(stored.nodes) if node.tokens for above in stored.path(at)}
        if not clean and any(REDACTED in str(tool) for tool in stored.tools):
            self._remember(stored.id, _Seen(len(stored.nodes), _ALL))
            return
        tainted: set[int] = set()
        for at, node in enumerate(stored.nodes):
            if at not in clean and (node.parent in tainted or REDACTED in node.model_dump_json(exclude={"tokens"})):
                tainted.add(at)
        self._remember(stored.id, _Seen(len(stored.nodes), frozenset(tainted)))

    def growth(self, growth: EpisodeGrowth) -> EpisodeGrowth:
        """Appended nodes, and marks: a strategy may have noted what an environment said."""
        if any(mark.search for mark in growth.marks):
            clean = redact_value(growth.model_copy(update={"nodes": ()}))
            growth = growth.model_copy(update={"marks": clean.marks})
        seen = self._seen.get(growth.trajectory_id, _Seen())
        nodes, tainted = redact_nodes(growth.nodes, first=growth.first, tainted=seen.tainted)
        if seen.tainted >= _ALL:
            nodes = tuple(_without_tokens(node) for node in nodes)
        known = max(seen.nodes, growth.first + len(growth.nodes))
        self._remember(growth.trajectory_id, _Seen(known, tainted))
        return growth.model_copy(update={"nodes": nodes}) if tainted else growth

    def end(self, end: EpisodeEnd) -> EpisodeEnd:
        """How an episode ended; it grows no more."""
        self._forget(end.trajectory_id)
        return redact_value(end)

    def drop(self, trajectory_ids: Sequence[str]) -> Sequence[str]:
        """Forget episodes; a later episode with the same id has other nodes."""
        for identity in trajectory_ids:
            self._forget(identity)
        return trajectory_ids

    def scores(self, scores: Sequence[Score]) -> tuple[Score, ...]:
        """Judgements, whose details may quote the episode."""
        return tuple(redact_value(score) for score in scores)

    def labels(self, labels: Sequence[Label]) -> tuple[Label, ...]:
        """Labels, whose texts may quote the episode."""
        return tuple(redact_value(label) for label in labels)

    def _remember(self, trajectory_id: str, seen: _Seen) -> None:
        with self._lock:
            self._seen[trajectory_id] = seen
            self._seen.move_to_end(trajectory_id)
            if len(self._seen) > _MOST_OPEN:
                self._seen.popitem(last=False)

    def _forget(self, trajectory_id: str) -> None:
        with self._lock:
            self._seen.pop(trajectory_id, None)


def _without_tokens(node: Node) -> Node:
    return node if node.tokens is None else node.model_copy(update={"tokens": None})
