"""Stores an episode call by call and remembers nothing of it but how far it came.

``journal.EpisodeJournal`` compares the episode with what it stored; the gateway holds hundreds of long ones at a time,
whose stored nodes lose their token ids, and none of them changes but for the mark that an action was executed.
"""

from __future__ import annotations

import asyncio

from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart, NodeMark
from openhands_rl_plugin.core.tree import DraftNode, EpisodeTree
from openhands_rl_plugin.core.types import Node


class Ledger:
    """Writes what is new in the tree of one episode, of which ``kept`` nodes are stored. Writes take turns."""

    def __init__(self, storage: TrajectoryStorage, start: EpisodeStart) -> None:
        self._storage = storage
        self.start = start
        self._begun = False
        self._rewards: list[float | None] = []
        self._turn = asyncio.Lock()

    def continue_after(self, tree: EpisodeTree) -> None:
        """All nodes of ``tree`` are stored."""
        self._begun = True
        self._rewards = [node.reward for node in tree.nodes]

    async def keep(self, tree: EpisodeTree) -> None:
        """Store the nodes and rewards that came since the last call. Raises ``StorageError``."""
        async with self._turn:
            if not self._begun:
                await self._storage.begin(self.start)
                self._begun = True
            first = len(self._rewards)
            rewards = [node.reward for node in tree.nodes]
            marks = tuple(
                _mark(index, tree.nodes[index])
                for index, (old, new) in enumerate(zip(self._rewards, rewards, strict=False))
                if old != new
            )
            if len(rewards) > first or marks:
                nodes = tuple(Node(**vars(node)) for node in tree.nodes[first:])
                await self._storage.grow(
                    EpisodeGrowth(trajectory_id=self.start.id, first=first, nodes=nodes, head=tree.head, marks=marks)
                )
            self._rewards = rewards

    async def end(self, tree: EpisodeTree, end: EpisodeEnd) -> None:
        """Store what is left and close the episode. Raises ``StorageError``."""
        await self.keep(tree)
        await self._storage.end(end)


def _mark(index: int, node: DraftNode) -> NodeMark:
    return NodeMark(index=index, reward=node.reward, simulated=node.simulated, value=node.value, visits=node.visits)
