"""Stores an episode while it runs, so that a killed run keeps every answered call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

from pydantic import JsonValue

from openhands_rl_plugin.core.concurrency import on_loop, shielded
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart, NodeMark, TrajectoryFilter
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Node, Trajectory

_Facts = tuple[float | None, bool, float | None, int, JsonValue]
"""The fields of a node that a mark sets: reward, simulated, value, visits, and the strategy's notes."""


def on_its_loop(storage: TrajectoryStorage, loop: asyncio.AbstractEventLoop) -> Any:
    """A storage that calls ``storage`` on its own event loop ``loop``, whatever loop it is used on.

    A method that ``storage`` has not, such as a pipe to another process, does nothing. Raises what the storage raises,
    and ``InfrastructureError`` when that loop is closed before the call.
    """
    return _StorageOnLoop(storage, loop)


class _StorageOnLoop:
    def __init__(self, storage: TrajectoryStorage, loop: asyncio.AbstractEventLoop) -> None:
        self._storage = storage
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*given: Any) -> Any:
            if (method := getattr(self._storage, name, None)) is not None:
                return await on_loop(self._loop, method(*given))

        return call


class EpisodeJournal:
    """Stores one episode from its first node to its end. What it holds survives a crash once ``keep`` has returned.

    The episode is opened by the first write, which drops an unfinished one of the same id: its nodes are no
    part of this one. Writes run one at a time; a started one is awaited even when its caller is cancelled.
    Of stored nodes only what may change is remembered, so that a gateway may hold hundreds of long episodes.
    """

    def __init__(self, storage: TrajectoryStorage, start: EpisodeStart) -> None:
        self.start = start
        self.storage: Any = storage
        self._begun = False
        self._ended = False
        self._head: int | None = None
        # Of the stored actions; what an environment or a host added does not change.
        self._facts: dict[int, _Facts] = {}
        # A digest of what each stored node's metadata says.
        self._noted: list[int] = []
        self._turn = asyncio.Lock()

    @classmethod
    def resumed(cls, storage: TrajectoryStorage, unfinished: Trajectory) -> Self:
        """The journal of an episode that continues after the nodes that are stored."""
        journal = cls(storage, EpisodeStart.of(unfinished))
        journal._begun = True
        journal._remember(unfinished.nodes, (), unfinished.head)
        return journal

    def lacks_answers(self, tree: EpisodeTree) -> bool:
        """Whether an answer of ``tree`` is not stored, or the episode is not open yet."""
        return not self._begun or any(node.sampled for node in tree.nodes[len(self._noted) :])

    async def keep(self, tree: EpisodeTree) -> None:
        """Store the nodes and marks that came since the last call; nothing after ``end``. Raises ``StorageError``."""
        await shielded(self._keep(tree))

    async def end(self, trajectory: Trajectory) -> None:
        """Store what is left of the frozen episode and close it. Raises ``StorageError``."""
        await shielded(self._close(trajectory))

    async def _keep(self, tree: EpisodeTree) -> None:
        async with self._turn:
            if self._ended:
                return
            if not self._begun:
                await self.storage.drop((self.start.id,))
                await self.storage.begin(self.start.model_copy(update={"tools": tree.tools or self.start.tools}))
                self._begun = True
            marks = self._changes(tree.nodes)
            new = tree.nodes[len(self._noted) :]
            if new or marks or tree.head != self._head:
                await self._grow(tuple(Node(**vars(node)) for node in new), marks, tree.head)

    async def _close(self, trajectory: Trajectory) -> None:
        async with self._turn:
            # No growth can express what a host noted on an earlier node: then the episode is stored again as a whole.
            known = [_digest(node) for node in trajectory.nodes[: len(self._noted)]]
            if not self._begun or self._noted != known:
                await self.storage.add(trajectory)
            else:
                marks, nodes = self._changes(trajectory.nodes), trajectory.nodes[len(known) :]
                if marks or nodes:
                    await self._grow(nodes, marks, trajectory.head)
                await self.storage.end(EpisodeEnd.of(trajectory))
            self._ended = True

    async def _grow(self, nodes: tuple[Node, ...], marks: tuple[NodeMark, ...], head: int | None) -> None:
        first = len(self._noted)
        await self.storage.grow(
            EpisodeGrowth(trajectory_id=self.start.id, first=first, nodes=nodes, head=head, marks=marks)
        )
        self._remember(nodes, marks, head)

    def _changes(self, nodes: Sequence[Node]) -> tuple[NodeMark, ...]:
        """Marks for the stored actions that are not any more as they were stored."""
        return tuple(_mark(at, now) for at, was in self._facts.items() if (now := _facts(nodes[at])) != was)

    def _remember(self, nodes: Sequence[Node], marks: Sequence[NodeMark], head: int | None) -> None:
        for mark in marks:
            search = self._facts[mark.index][-1] if mark.search is None else mark.search
            self._facts[mark.index] = mark.reward, mark.simulated, mark.value, mark.visits, search
        self._facts |= {at: _facts(node) for at, node in enumerate(nodes, len(self._noted)) if node.sampled}
        self._noted += map(_digest, nodes)
        self._head = head


async def stored_episode(storage: TrajectoryStorage, trajectory_id: str) -> Trajectory | None:
    """A stored episode, finished or not; ``None`` if unknown, or in a write-only storage. Raises ``StorageError``."""
    find: Any = getattr(storage, "find", None)
    if find is None:
        return None
    where = TrajectoryFilter(ids=(trajectory_id,), finished=None)
    return next(iter([found async for found, _ in find(where)]), None)


def _digest(node: Node) -> int:
    """A hash of the node's metadata that a host may change, without that of search."""
    return hash(repr({name: value for name, value in node.metadata.items() if name != "search"}))


def _facts(node: Node) -> _Facts:
    return node.reward, node.simulated, node.value, node.visits, node.metadata.get("search")


def _mark(index: int, facts: _Facts) -> NodeMark:
    reward, simulated, value, visits, search = facts
    return NodeMark(index=index, reward=reward, simulated=simulated, value=value, visits=visits, search=search)
