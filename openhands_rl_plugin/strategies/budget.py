"""What a search may spend, and what it has spent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pydantic import Field

from openhands_rl_plugin.types import Completion, Frozen, JsonObject


class SearchBudget(Frozen):
    """Bounds; ``None`` is none. They are looked at before each call and step, so the last one may go over ``tokens``.

    ``calls``: completions asked for. ``tokens``: prompt and sampled tokens, as the server bills them. ``steps``: of
    forked environments. ``seconds``: of wall time.
    """

    calls: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)


@dataclass
class Spending:
    """A running account against a budget."""

    budget: SearchBudget = field(default_factory=SearchBudget)
    calls: int = 0
    tokens: int = 0
    steps: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Wall time since the account was opened."""
        return time.monotonic() - self.started

    def charge(self, completion: Completion) -> None:
        """Enter one completion."""
        self.calls += 1
        self.tokens += completion.usage.prompt_tokens + completion.usage.completion_tokens

    def exhausted(self) -> str | None:
        """The name of the first bound that is reached, or ``None``."""
        for name in type(self.budget).model_fields:
            bound = getattr(self.budget, name)
            if bound is not None and getattr(self, name) >= bound:
                return name
        return None

    def calls_left(self, wanted: int) -> int:
        """How many of ``wanted`` completions may be asked for at once."""
        return wanted if self.budget.calls is None else max(0, min(wanted, self.budget.calls - self.calls))

    def report(self) -> JsonObject:
        """The account as JSON."""
        return {"calls": self.calls, "tokens": self.tokens, "steps": self.steps, "seconds": round(self.seconds, 6)}
