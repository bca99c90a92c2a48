"""How much an edit changes, so that a diff of it for people holds up nobody."""

from __future__ import annotations

from itertools import takewhile

# Products of lines before and after, which is what a diff by lines takes in time: about a second.
_MOST = 4_000_000


def is_rewritten(before: str | None, after: str | None) -> bool:
    """Whether so much differs between two texts that their lines are not compared one with another."""
    old, new = (text.split("\n") if text else [] for text in (before, after))
    start = _equal(old, new)
    end = _equal(old[start:][::-1], new[start:][::-1])
    return (len(old) - start - end) * (len(new) - start - end) > _MOST


def _equal(some: list[str], others: list[str]) -> int:
    """How many lines are the same from the first on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))
