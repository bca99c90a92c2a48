"""Packs training sequences without padding, with shared prefixes stored once (a prefix tree).

Rollouts of a group have the same prompt, and often the same first turns. A token's hidden state depends on the tokens
before it only, so a shared prefix needs one computation, in which the gradients of all continuations are summed. The
result is the same as without sharing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.core.arrays import Ids

MIN_SHARED = 16
"""Shorter common prefixes are not shared: an additional attention call costs more than computing them twice."""


@dataclass(frozen=True)
class Run:
    """Rows ``start:stop`` are consecutive tokens, rows ``stop:end`` all their continuations.

    ``depth``: the number of tokens before the run in each of its sequences. ``parent``: the index of the run with the
    last of them.
    """

    start: int
    stop: int
    end: int
    depth: int
    parent: int | None


@dataclass(frozen=True)
class Layout:
    """``ids`` and ``positions`` of N rows; ``rows[s][t]`` is the row of token t of sequence s."""

    ids: Ids
    positions: tuple[int, ...]
    runs: tuple[Run, ...]
    rows: tuple[tuple[int, ...], ...]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of equal leading items."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def lay_out(sequences: Iterable[Iterable[int]]) -> Layout:
    """The layout of one or more non-empty ``sequences``. A run is directly followed by all its descendants."""
    known = [Ids(each) for each in sequences]
    rows: list[tuple[int, ...]] = [()] * len(known)
    ids: list[Ids] = []
    positions: list[int] = []
    above: dict[int, int | None] = {}  # the first row of each run -> the row before it in its sequences
    # Of the sequence before, in the order of their ids: its tokens, their rows, and where its runs begin.
    before, path, cuts = Ids(), (), [0]
    for at in sorted(range(len(known)), key=lambda at: bytes(known[at])):
        shared, before = common_prefix(before, known[at]), known[at]
        while cuts[-1] > shared:
            cuts.pop()
        if shared - cuts[-1] < MIN_SHARED:
            shared = cuts[-1]
        elif shared < len(before):
            cuts.append(shared)
        if shared < len(before):
            first, branch = len(positions), path[shared - 1] if shared else None
            above[first] = branch
            if branch is not None:
                above.setdefault(branch + 1, branch)
            path = (*path[:shared], *range(first, first + len(before) - shared))
            positions.extend(range(shared, len(before)))
            ids.append(before[shared:])
        rows[at] = path
    starts = sorted(above)
    stops = [*starts[1:], len(positions)]
    parents = [None if (up := above[start]) is None else bisect_right(starts, up) - 1 for start in starts]
    ends = list(stops)
    for index in range(len(starts) - 1, -1, -1):
        if (parent := parents[index]) is not None:
            ends[parent] = max(ends[parent], ends[index])
    spans = zip(starts, stops, ends, parents, strict=True)
    runs = tuple(Run(start, stop, end, positions[start], parent) for start, stop, end, parent in spans)
    return Layout(Ids(b"".join(ids)), tuple(positions), runs, tuple(rows))
