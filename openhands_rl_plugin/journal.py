"""Stores an episode while it is played, so that a killed run keeps every call that was answered."""

from __future__ import annotations

import asyncio

from openhands_rl_plugin.protocols import TrajectoryStorage
from openhands_rl_plugin.records import EpisodeEnd, EpisodeGrowth, EpisodeStart, NodeMark
from openhands_rl_plugin.tree import DraftNode, EpisodeTree
from openhands_rl_plugin.types import Node, Trajectory

_Mark = tuple[float | None, float | None, int]


class EpisodeJournal:
    """Writes what is new in a tree. The episode is opened with the first write; writes of one journal take turns."""

    def __init__(self, storage: TrajectoryStorage, start: EpisodeStart) -> None:
        self._storage = storage
        self._start = start
        self._begun = False
        self._head: int | None = None
        self._marks: list[_Mark] = []
        self._turn = asyncio.Lock()

    async def keep(self, tree: EpisodeTree) -> None:
        """Store the nodes and marks that came since the last call. Raises ``StorageError``."""
        async with self._turn:
            await self._begin()
            known = len(self._marks)
            marks = [_mark_of(node) for node in tree.nodes]
            changed = tuple(_node_mark(at, mark) for at, mark in enumerate(marks[:known]) if mark != self._marks[at])
            if len(marks) == known and not changed and tree.head == self._head:
                return
            growth = EpisodeGrowth(
                trajectory_id=self._start.id,
                first=known,
                nodes=tuple(Node(**vars(node)) for node in tree.nodes[known:]),
                head=tree.head,
                marks=changed,
            )
            await self._storage.grow(growth)
            self._marks, self._head = marks, growth.head

    async def end(self, trajectory: Trajectory) -> None:
        """Store what is left of the frozen episode and close it. Raises ``StorageError``."""
        async with self._turn:
            if not self._begun:
                await self._storage.add(trajectory)
                return
            known = len(self._marks)
            marks = [(node.reward, node.value, node.visits) for node in trajectory.nodes[:known]]
            changed = tuple(_node_mark(at, mark) for at, mark in enumerate(marks) if mark != self._marks[at])
            if changed or len(trajectory.nodes) > known:
                await self._storage.grow(
                    EpisodeGrowth(
                        trajectory_id=trajectory.id,
                        first=known,
                        nodes=trajectory.nodes[known:],
                        head=trajectory.head,
                        marks=changed,
                    )
                )
            await self._storage.end(_end_of(trajectory))

    async def _begin(self) -> None:
        if not self._begun:
            await self._storage.begin(self._start)
            self._begun = True


def start_of(trajectory: Trajectory) -> EpisodeStart:
    """The part of a trajectory that was known before it was played."""
    return EpisodeStart(
        schema_version=trajectory.schema_version,
        id=trajectory.id,
        run_id=trajectory.run_id,
        group_id=trajectory.group_id,
        task=trajectory.task,
        strategy=trajectory.strategy,
        policy=trajectory.policy,
        tools=trajectory.tools,
        started=trajectory.times.started,
    )


def _end_of(trajectory: Trajectory) -> EpisodeEnd:
    return EpisodeEnd(
        trajectory_id=trajectory.id,
        head=trajectory.head,
        stop=trajectory.stop,
        policy=trajectory.policy,
        tools=trajectory.tools,
        evidence=trajectory.evidence,
        failure=trajectory.failure,
        usage=trajectory.usage,
        finished=trajectory.times.finished,
    )


def _mark_of(node: DraftNode) -> _Mark:
    return node.reward, node.value, node.visits


def _node_mark(index: int, mark: _Mark) -> NodeMark:
    reward, value, visits = mark
    return NodeMark(index=index, reward=reward, value=value, visits=visits)
