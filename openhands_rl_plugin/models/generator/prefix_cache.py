"""Prefix cache: a tree of fixed-size blocks of keys and values per adapter version."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

BLOCK_TOKENS = 16
_NODE_BYTES = 2048
"""What Python and torch keep for a block beside its keys and values."""
Block = tuple[int, ...]


@dataclass(eq=False)
class _Node:
    owner: Hashable
    parent: _Node | None = None
    tokens: Block = ()
    kv: Tensor | None = None
    children: dict[Block, _Node] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefixMatch:
    """The cached prefix of a prompt.

    ``blocks``: keys and values of its first ``len(blocks) * BLOCK_TOKENS`` tokens. ``missing`` identifies the first
    full block that is not cached (``None`` when all are), so that two prompts that need the same block are recognised.
    """

    blocks: tuple[Tensor, ...]
    missing: tuple[Hashable, Block] | None


class PrefixCache:
    """Evicts the least recently used blocks when ``max_bytes`` is exceeded. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._roots: dict[Hashable, _Node] = {}
        # Oldest first. A path is touched leaf first, so a node is never older than its descendants and the
        # oldest node is always a leaf.
        self._by_age: OrderedDict[_Node, None] = OrderedDict()

    def match(self, owner: Hashable, ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix of ``ids`` (never all of it: the last token must be computed)."""
        node = self._roots.get(owner) or _Node(owner)
        found: list[_Node] = []
        missing: tuple[Hashable, Block] | None = None
        for block in _full_blocks(ids, len(ids) - 1):
            child = node.children.get(block)
            if child is None:
                missing = ((owner, len(found), found[-1] if found else None), block)
                break
            node = child
            found.append(node)
        self._touch(found)
        return PrefixMatch(tuple(n.kv for n in found if n.kv is not None), missing)

    def insert(self, owner: Hashable, ids: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Add the full blocks of ``ids`` that are new; ``read(start, stop)`` copies their keys and values."""
        if not self.max_bytes:
            return
        node = self._roots.setdefault(owner, _Node(owner))
        path: list[_Node] = []
        for index, block in enumerate(_full_blocks(ids, len(ids))):
            child = node.children.get(block)
            if child is None:
                start = index * BLOCK_TOKENS
                child = _Node(owner, node, block, read(start, start + BLOCK_TOKENS))
                node.children[block] = child
                self.bytes += _size(child)
            node = child
            path.append(node)
        self._touch(path)
        while self.bytes > self.max_bytes:
            self._remove(next(iter(self._by_age)))

    def drop(self, owner: Hashable) -> None:
        """Remove all blocks of an adapter version."""
        root = self._roots.pop(owner, None)
        pending = list(root.children.values()) if root else []
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            del self._by_age[node]
            self.bytes -= _size(node)

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._by_age[node] = None
            self._by_age.move_to_end(node)

    def _remove(self, leaf: _Node) -> None:
        del self._by_age[leaf]
        self.bytes -= _size(leaf)
        if leaf.parent is not None:
            del leaf.parent.children[leaf.tokens]


def _full_blocks(ids: Sequence[int], limit: int) -> list[Block]:
    stops = range(BLOCK_TOKENS, limit + 1, BLOCK_TOKENS)
    return [tuple(ids[stop - BLOCK_TOKENS : stop]) for stop in stops]


def _size(node: _Node) -> int:
    return 0 if node.kv is None else node.kv.numel() * node.kv.element_size() + _NODE_BYTES
