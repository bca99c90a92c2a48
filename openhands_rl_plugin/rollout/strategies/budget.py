"""The budget of a search, and the account of its use."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, JsonValue

from openhands_rl_plugin.core.types import Completion, Frozen, JsonObject

Counted = Literal["calls", "steps"]
"""Counted before it is requested."""


class StrictOptions(Frozen):
    """Options as a configuration file gives them, with types of its own: no truth or text for a number, and numbers
    that are finite, because a search computes with them."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class SearchBudget(StrictOptions):
    """Bounds; ``None`` is none.

    ``calls``: completions requested. ``steps``: of forked environments, including replays to reach a state. Both are
    counted before they are requested, so that concurrent branches keep to them together. ``tokens``: prompt and
    sampled tokens, as the server bills them; they are known when a call is answered, so that the calls under way may go
    over. ``seconds``: of wall time while turns are searched, not of that between them; what is under way when they are
    over is given up, and its tokens are not known. They alone bound what a verifier or a reward computes to judge a
    state.
    """

    calls: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, ge=0.001)


class Least(NamedTuple):
    """The fewest calls and steps that something takes."""

    calls: int = 0
    steps: int = 0

    def times(self, count: int) -> Least:
        """So often."""
        return Least(count * self.calls, count * self.steps)

    def after(self, before: Least) -> Least:
        """Together with what comes before."""
        return Least(self.calls + before.calls, self.steps + before.steps)


class SpentError(Exception):
    """A budget does not allow the request."""


@dataclass
class Spending:
    """A running account against a budget. Its clock runs between ``begin`` and ``pause``."""

    budget: SearchBudget = field(default_factory=SearchBudget)
    calls: int = 0
    tokens: int = 0
    steps: int = 0
    before: float = 0.0
    since: float | None = None

    @classmethod
    def resumed(cls, budget: SearchBudget, report: JsonValue) -> Self:
        """An account that continues from its own ``report``, or a new one when there is none."""
        reported = report if isinstance(report, dict) else {}
        known = {name: spent for name, spent in reported.items() if isinstance(spent, int | float)}
        counts = {name: int(known.get(name, 0)) for name in ("calls", "tokens", "steps")}
        return cls(budget, **counts, before=known.get("seconds", 0.0))

    def begin(self) -> None:
        """Start the clock."""
        self.since = time.monotonic()

    def pause(self) -> None:
        """Stop the clock."""
        self.before, self.since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Wall time while the clock ran."""
        return self.before + (0.0 if self.since is None else time.monotonic() - self.since)

    @property
    def seconds_left(self) -> float | None:
        """Wall time until the budget's is over, ``None`` without a bound."""
        return None if self.budget.seconds is None else self.budget.seconds - self.seconds

    def enter(self, what: Counted, count: int) -> None:
        """Count calls or steps that are requested now."""
        setattr(self, what, getattr(self, what) + count)

    def charge(self, completion: Completion) -> None:
        """Add the tokens of an answer, whose call was entered."""
        self.tokens += completion.usage.prompt_tokens + completion.usage.completion_tokens

    def exhausted(self) -> str | None:
        """The name of the first bound that is reached, or ``None``."""
        for name in type(self.budget).model_fields:
            bound = getattr(self.budget, name)
            if bound is not None and getattr(self, name) >= bound:
                return name
        return None

    def left(self, what: Counted, wanted: int) -> int:
        """How many of ``wanted`` calls or steps may be requested."""
        bound = getattr(self.budget, what)
        return wanted if bound is None else max(0, min(wanted, bound - getattr(self, what)))

    def report(self) -> JsonObject:
        """The account as JSON."""
        return {"calls": self.calls, "tokens": self.tokens, "steps": self.steps, "seconds": round(self.seconds, 6)}
