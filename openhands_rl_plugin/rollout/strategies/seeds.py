"""The seed of a search's call: it depends on the call and its episode, not on the time."""

from __future__ import annotations

import zlib
from typing import Protocol, runtime_checkable

from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.rollout.strategies.annotations import action_key, notes, times_merged

# Larger than any number of answers to one call, whose seeds are consecutive.
_SEED_STEP = 7_919
_SEEDS = 2**31


@runtime_checkable
class KnowsItsEpisode(Protocol):
    """An engine of one episode that says which seed the episode has. A capability, not a flag."""

    @property
    def episode_seed(self) -> int | None:
        """The seed, ``None`` where the episode has none."""
        ...


def call_seed(seed: int, engine: LLMEngine, tree: EpisodeTree, parent: int | None, asking: int) -> int:
    """The seed of a search with ``seed`` for its next call at ``parent``, where ``asking`` answers are under way.

    Episodes of one task differ by their own seeds, or all samples of a group would be the same.
    """
    return (seed + _of_episode(engine) + _place(tree, parent, asking)) % _SEEDS


def _of_episode(engine: LLMEngine) -> int:
    known = engine.episode_seed if isinstance(engine, KnowsItsEpisode) else None
    return 0 if known is None else zlib.crc32(str(known).encode())


def _place(tree: EpisodeTree, parent: int | None, asking: int) -> int:
    """A number of a call within its episode, by its place in the tree and its count there, not by time."""
    said = 0
    for at in tree.path(parent) if parent is not None else ():
        if tree.nodes[at].sampled:
            said = zlib.crc32(repr(action_key(tree.nodes[at].message)).encode("utf-8", "surrogatepass"), said)
    below = [tree.nodes[at] for at in tree.children(parent)]
    drawn = sum(1 + times_merged(notes(node)) for node in below if node.sampled)
    return said + _SEED_STEP * (drawn + asking)
