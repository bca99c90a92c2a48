"""Conditions on the columns of a listing, which every storage turns into its own language.

>>> from openhands_rl_plugin.core.browsing.terms import Column, Match, Term
>>> Term(column=Column.TURNS, any_of=(Match(above=20),)).holds(21)
True
"""

from __future__ import annotations

import re
from enum import StrEnum

from pydantic import Field

from openhands_rl_plugin.core.types import Frozen


class Column(StrEnum):
    """What is known of an episode without reading its nodes."""

    ID = "id"
    RUN = "run"
    GROUP = "group"
    TASK = "task"
    ENVIRONMENT = "environment"
    SPLIT = "split"
    STRATEGY = "strategy"
    MODEL = "model"
    ADAPTER = "adapter"
    VERSION = "version"
    STOP = "stop"
    FAILED = "failed"
    REWARD = "reward"
    RETURN = "return"
    NODES = "nodes"
    TURNS = "turns"
    TOKENS = "tokens"
    CALLS = "calls"
    STEPS = "steps"
    SECONDS = "seconds"
    STARTED = "started"
    FINISHED = "finished"


TEXTS = frozenset(
    {
        *(Column.ID, Column.RUN, Column.GROUP, Column.TASK, Column.ENVIRONMENT, Column.SPLIT, Column.STRATEGY),
        *(Column.MODEL, Column.ADAPTER, Column.STOP, Column.FAILED),
    }
)
"""Columns of texts; the others are numbers."""


class Match(Frozen):
    """One value, or a kind of value; all that is set must hold. With nothing set: any value, but not an unknown one.

    ``text`` is equal; ``like`` are the pieces of a pattern, with anything between them: ``("ab", "")`` begins with
    "ab". Bounds are those of numbers. ``first_version`` and ``last_version`` (inclusive) go with an adapter.
    """

    text: str | None = None
    like: tuple[str, ...] | None = Field(default=None, min_length=2)
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    first_version: int | None = None
    last_version: int | None = None

    def holds(self, value: str | float | None, version: int | None = None) -> bool:
        """Whether a value, of an adapter with its version, is meant."""
        if value is None or (isinstance(value, float) and value != value):
            return False
        if isinstance(value, str):
            return self._names(value) and self._has(version)
        bounds = ((self.at_least, 1), (self.at_most, -1))
        strict = ((self.above, 1), (self.below, -1))
        return all(bound is None or sign * (value - bound) >= 0 for bound, sign in bounds) and all(
            bound is None or sign * (value - bound) > 0 for bound, sign in strict
        )

    def _names(self, value: str) -> bool:
        if self.text is not None and value != self.text:
            return False
        return self.like is None or re.fullmatch(".*".join(map(re.escape, self.like)), value, re.DOTALL) is not None

    def _has(self, version: int | None) -> bool:
        if self.first_version is None and self.last_version is None:
            return True
        first, last = self.first_version or 0, self.last_version
        return version is not None and first <= version and (last is None or version <= last)


class Term(Frozen):
    """A condition: one of ``any_of`` holds of the column's value, or with ``negated`` none of them does."""

    column: Column
    any_of: tuple[Match, ...] = Field(min_length=1)
    negated: bool = False

    def holds(self, value: str | float | None, version: int | None = None) -> bool:
        """Whether an episode with this value is meant."""
        return any(each.holds(value, version) for each in self.any_of) is not self.negated


def begins(column: Column, beginning: str) -> Term:
    """The term of values that begin like that."""
    return Term(column=column, any_of=(Match(like=(beginning, "")),))
