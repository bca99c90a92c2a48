"""Packs training sequences without padding, with shared prefixes stored once (a prefix tree).

Rollouts of a group have the same prompt, and often the same first turns. A token's hidden state depends on the tokens
before it only, so a shared prefix needs one computation, in which the gradients of all continuations are summed. The
result is the same as without sharing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    return _Builder([Ids(each) for each in sequences]).build()


class _Builder:
    def __init__(self, sequences: Sequence[Ids]) -> None:
        self._order = sorted(range(len(sequences)), key=lambda at: bytes(sequences[at]))
        self._sorted = [sequences[at] for at in self._order]
        # _shared[i]: length of the common prefix of sequence i and its left neighbour
        self._shared = [0, *map(common_prefix, self._sorted, self._sorted[1:])]
        self._ids: list[Ids] = []
        self._spans: list[tuple[int, int, int, int | None]] = []
        self._leaf_runs: list[int | None] = [None] * len(sequences)

    def build(self) -> Layout:
        # Sequences ``first:last`` whose tokens up to ``depth`` are in ``parent`` and the runs above it
        pending: list[tuple[int, int, int, int | None]] = list(self._groups(0, len(self._sorted), 0, None))[::-1]
        while pending:
            first, last, depth, parent = pending.pop()
            stop = min(self._shared[first + 1 : last], default=len(self._sorted[first]))
            run = self._add(self._sorted[first][depth:stop], depth, parent)
            while first < last and len(self._sorted[first]) == stop:
                self._leaf_runs[self._order[first]] = run
                first += 1
            pending.extend(list(self._groups(first, last, stop, run))[::-1])
        runs = self._with_ends()
        return Layout(
            ids=Ids(b"".join(self._ids)),
            positions=tuple(run.depth + at for run in runs for at in range(run.stop - run.start)),
            runs=runs,
            rows=tuple(_rows(runs, leaf) for leaf in self._leaf_runs),
        )

    def _groups(
        self, first: int, last: int, depth: int, parent: int | None
    ) -> Iterator[tuple[int, int, int, int | None]]:
        """Cut ``first:last`` where neighbours share fewer than ``MIN_SHARED`` tokens after ``depth``."""
        start = first
        for at in range(first + 1, last + 1):
            if at == last or self._shared[at] - depth < MIN_SHARED:
                yield start, at, depth, parent
                start = at

    def _add(self, ids: Ids, depth: int, parent: int | None) -> int:
        start = self._spans[-1][1] if self._spans else 0
        self._spans.append((start, start + len(ids), depth, parent))
        self._ids.append(ids)
        return len(self._spans) - 1

    def _with_ends(self) -> tuple[Run, ...]:
        ends = [stop for _, stop, _, _ in self._spans]
        for index in range(len(self._spans) - 1, -1, -1):
            if (parent := self._spans[index][3]) is not None:
                ends[parent] = max(ends[parent], ends[index])
        return tuple(
            Run(start=start, stop=stop, end=end, depth=depth, parent=parent)
            for (start, stop, depth, parent), end in zip(self._spans, ends, strict=True)
        )


def _rows(runs: Sequence[Run], leaf: int | None) -> tuple[int, ...]:
    chain: list[Run] = []
    while leaf is not None:
        chain.append(runs[leaf])
        leaf = runs[leaf].parent
    return tuple(row for run in reversed(chain) for row in range(run.start, run.stop))
