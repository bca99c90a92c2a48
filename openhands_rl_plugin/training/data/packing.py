"""Training sequences into micro-batches.

Sequences are packed without padding, with shared prefixes stored once (a prefix tree). Rollouts of a group have the
same prompt, and often the same first turns. A token's hidden state depends on the tokens before it only, so a shared
prefix needs one computation, in which the gradients of all continuations are summed. The result is the same as without
sharing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from openhands_rl_plugin.core.arrays import Ids
from openhands_rl_plugin.core.types import Sample

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


def pack(samples: Sequence[Sample], max_tokens_per_micro_batch: int) -> list[list[Sample]]:
    """Group samples so that each group takes at most ``max_tokens_per_micro_batch`` rows when laid out.

    Sequences are packed without padding, so samples are grouped by common prefix, not by length: a prefix that
    neighbours share is computed once. Of all partitions of the sorted samples into groups of neighbours the one with
    the fewest recomputed tokens is chosen, and of those the one with the fewest groups. A sample longer than the limit
    is a group of its own. Every sample is in exactly one group; the result does not depend on the order of ``samples``,
    except for the order of equal ones.
    """
    ordered = sorted(samples, key=lambda sample: bytes(sample.input_ids))
    # The length of the common prefix of each with its left neighbour. The layout may leave up to MIN_SHARED tokens of
    # it unshared, so rows are an upper bound.
    shared = [0] * len(ordered)
    for at in range(1, len(ordered)):
        common = common_prefix(ordered[at - 1].input_ids, ordered[at].input_ids)
        shared[at] = max(0, common - MIN_SHARED)
    starts = _cheapest_starts([len(sample.input_ids) for sample in ordered], shared, max_tokens_per_micro_batch)
    return [ordered[start:stop] for start, stop in pairwise((*starts, len(ordered)))]


def _cheapest_starts(lengths: Sequence[int], shared: Sequence[int], limit: int) -> list[int]:
    """Start indices of the groups, with the fewest tokens shared across a cut, then the fewest groups."""
    # Of the first n samples: tokens computed twice, groups, and where the last group begins
    best = [(0, 0, 0)]
    for stop in range(1, len(lengths) + 1):
        rows, found = 0, None
        for start in range(stop - 1, -1, -1):
            # The first of a group is computed whole, because its left neighbour is in another group.
            rows += lengths[start] - (shared[start + 1] if start + 1 < stop else 0)
            if rows > limit and start < stop - 1:
                break
            twice, groups, _ = best[start]
            lost = shared[start] + MIN_SHARED if shared[start] else 0
            cost = (twice + lost, groups + 1, start)
            found = cost if found is None else min(found, cost)
        assert found is not None  # a sample alone is always a group
        best.append(found)
    starts: list[int] = []
    at = len(lengths)
    while at > 0:
        at = best[at][2]
        starts.append(at)
    return starts[::-1]
