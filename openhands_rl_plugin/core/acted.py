"""Which nodes of an episode's tree were acted on: the path to its head, and those that a rewritten history left.

A host that condenses, merges or cuts the history goes on in a new branch, so that an episode without any search may
have several paths (segments) that were all acted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import JsonValue

TURN, CONDENSATION, SIDE = "turn", "condensation", "side request"
"""Kinds of nodes: a message of the episode; a host's request to summarise its history, and the summary; another request
of a client beside the episode, such as one for a title."""

KIND, ACTED, REWRITTEN = "kind", "acted", "history_rewritten"
"""Keys of a node's metadata, which every release can read. ``ACTED`` is for imports, where no reward says so;
``REWRITTEN``: the answer's prompt does not extend the conversation before."""

AT, SECONDS = "at", "seconds"
"""Keys of a node's metadata: when it was made, in Unix time, and how long an answer took to sample. Kept there, where
every release can read them."""


class TreeNode(Protocol):
    """The fields of a node that are looked at here."""

    @property
    def parent(self) -> int | None: ...
    @property
    def sampled(self) -> bool: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def simulated(self) -> bool: ...
    @property
    def metadata(self) -> dict[str, JsonValue]: ...


def kind_of(node: TreeNode) -> str:
    """``TURN``, or what else a host wrote or sampled beside the episode."""
    kind = node.metadata.get(KIND)
    return kind if isinstance(kind, str) else TURN


class TimedNode:
    """The times that a recorder noted on a node."""

    metadata: dict[str, JsonValue]

    @property
    def at(self) -> float | None:
        """When it was made, in Unix time; ``None`` where its recorder did not say."""
        return _first_number(self.metadata, AT)

    @property
    def seconds(self) -> float | None:
        """How long the answer took to sample, as far as its recorder measured that."""
        return _first_number(self.metadata, SECONDS, "latency")


def _first_number(metadata: dict[str, JsonValue], *names: str) -> float | None:
    values = (metadata.get(name) for name in names)
    numbers = (value for value in values if isinstance(value, int | float) and not isinstance(value, bool))
    return next(map(float, numbers), None)


def was_executed(node: TreeNode) -> bool:
    """Whether it is an answer that the live environment or the host went on from; a simulation does not count."""
    stepped = node.reward is not None and not node.simulated
    return node.sampled and (stepped or node.metadata.get(ACTED) is True) and kind_of(node) == TURN


def path_to(nodes: Sequence[TreeNode], leaf: int | None) -> tuple[int, ...]:
    """Node indices from the root to ``leaf``."""
    indices: list[int] = []
    while leaf is not None:
        indices.append(leaf)
        leaf = nodes[leaf].parent
    return tuple(reversed(indices))


def acted_nodes(nodes: Sequence[TreeNode], head: int | None) -> tuple[int, ...]:
    """Indices of the answers that were acted on, in order.

    Those of the path to ``head``, and executed ones on other paths. Of several answers in one state only the one on the
    path was acted on, and elsewhere those that the episode went on from, unless a rewritten history led there again. No
    malformed, dropped or only simulated answer, and no summary.
    """
    if head is None:
        return ()
    path = {at for at in path_to(nodes, head) if nodes[at].sampled and kind_of(nodes[at]) == TURN}
    decided = {nodes[at].parent for at in path if REWRITTEN not in nodes[at].metadata}
    others = {at for at, node in enumerate(nodes) if was_executed(node) and node.parent not in decided}
    return tuple(sorted(path | others - _superseded(nodes, others)))


def _superseded(nodes: Sequence[TreeNode], executed: set[int]) -> set[int]:
    """Those that the episode did not go on from, as it did from another answer in the same state."""
    continued: set[int] = set()
    for at in executed:
        up = nodes[at].parent
        while up is not None and up not in continued:
            continued.add(up)
            up = nodes[up].parent
    decided = {nodes[at].parent for at in executed & continued if REWRITTEN not in nodes[at].metadata}
    ends = executed - continued
    return {at for at in ends if nodes[at].parent in decided and REWRITTEN not in nodes[at].metadata}


def acted_ends(nodes: Sequence[TreeNode], head: int | None) -> tuple[int, ...]:
    """The last node of every path that was acted on, in order; the last one is ``head``."""
    if head is None:
        return ()
    last = set(path_to(nodes, head))
    left = [at for at in acted_nodes(nodes, head) if at not in last]
    inner = {up for at in left for up in path_to(nodes, at)[:-1]}
    return (*(at for at in left if at not in inner), head)


_SESSIONS = frozenset({"gateway", "workspace"})


def pays_rewards(environment: str, evidence: dict[str, JsonValue]) -> bool:
    """Whether the steps of an episode could earn rewards. Those of a client's session and of a session in a workspace
    (which leaves a patch) cannot, and those that the environment notes as ``unrewarded`` have not: their 0.0 says only
    that a step was executed, and others judge the outcome."""
    return environment not in _SESSIONS and "git_patch" not in evidence and evidence.get("unrewarded") is not True
