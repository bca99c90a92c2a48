"""The options that all searches share, the budget of a search with its account, and the log of one search."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from openhands_rl_plugin.core.errors import ConfigError, problems
from openhands_rl_plugin.core.tree import DraftNode
from openhands_rl_plugin.core.types import Completion, Failure, Frozen, JsonObject, Message, Node, SamplingParams

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


class SearchOptions(StrictOptions):
    """The options of all strategies that sample several answers and judge them.

    ``temperature`` makes branches differ. ``seed`` makes a search repeatable as long as no budget cuts it and no branch
    dies: a call's seed follows from it, from the episode's own where the engine says that, and from the actions before
    the call, not from concurrent calls (``None`` leaves seeds to the engine). ``sampling`` holds the other sampling
    parameters. ``turn_budget`` bounds the search for one turn, ``episode_budget`` that of all turns together; once the
    latter is spent every turn is one plain completion. A budget with fewer calls or steps than one move takes is
    refused. ``max_nodes`` bounds the tree. ``value`` names the function that judges a state. ``step_timeout`` is in
    seconds, for one step of a fork together with making it, and for closing one; in a workspace the commands' own
    limits count where they are longer. ``open_worlds`` bounds the forks held at a time.
    """

    sampling: SamplingParams = SamplingParams()
    temperature: float = Field(default=1.0, gt=0)
    seed: int | None = None
    turn_budget: SearchBudget = SearchBudget()
    episode_budget: SearchBudget = SearchBudget()
    max_nodes: int = Field(default=20_000, ge=1)
    value: str = "model"
    value_options: JsonObject = Field(default_factory=dict)
    step_timeout: float = Field(default=60.0, gt=0)
    open_worlds: int = Field(default=64, ge=1)

    @field_validator("sampling")
    @classmethod
    def _leave_what_search_sets(cls, sampling: SamplingParams) -> SamplingParams:
        for name in ("temperature", "seed"):
            if getattr(sampling, name) is not None:
                raise ValueError(f"sampling.{name} has no effect in a search: set {name} itself")
        return sampling


def checked[M: BaseModel](kind: type[M], options: Mapping[str, object]) -> M:
    """``options`` as a model. Raises ``ConfigError`` that names the wrong ones, each on a line."""
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        lines = (f"{kind.__name__}: {'.'.join(at)}: {what}" for at, what in problems(error, kind))
        raise ConfigError("\n".join(lines)) from error


def options_of[O: SearchOptions](kind: type[O], options: O | None, changes: Mapping[str, object], value: object) -> O:
    """The options of a strategy, which are given whole or one by one; ``value`` may be a name, which is one of them.

    Raises ``ConfigError`` for wrong ones, and where both are given.
    """
    if isinstance(value, str):
        changes = {**changes, "value": value}
    if options is not None and changes:
        raise ConfigError(f"{', '.join(sorted(changes))}: has no effect beside {kind.__name__}: set it in there")
    return checked(kind, changes) if options is None else options


@dataclass
class SearchLog:
    """What happened in one search, for the decided node's metadata.

    ``dropped`` branches died or were refused by the model, ``unjudged`` states have no estimate, and of the
    ``undecided`` ones the model said neither yes nor no. ``refused``: the model took no prompt in a
    branch, which does not mean that it will take none in the episode.
    """

    merged: int = 0
    dropped: int = 0
    unjudged: int = 0
    undecided: int = 0
    refused: bool = False
    last_failure: Failure | None = None
    cut_by: str | None = None
    extra: JsonObject = field(default_factory=dict)

    def report(self) -> JsonObject:
        """The counts as JSON."""
        names = ("merged", "dropped", "cut_by", "unjudged", "undecided")
        failure: JsonObject = {} if self.last_failure is None else {"last_failure": self.last_failure.message}
        return {**{name: getattr(self, name) for name in names}, **failure, **self.extra}


NOTES = "search"
"""The key of the strategies' own part of a node's metadata."""


def notes(node: DraftNode | Node) -> JsonObject:
    """The strategies' part of a node's metadata, to be read."""
    found = node.metadata.get(NOTES)
    return found if isinstance(found, dict) else {}


def note(node: DraftNode) -> JsonObject:
    """The strategies' part of a node's metadata, to be written."""
    found = node.metadata.setdefault(NOTES, {})
    assert isinstance(found, dict)
    return found


def ended(node: DraftNode) -> bool:
    """Whether the episode ended, in a simulation, with this action."""
    return "ended" in notes(node)


def times_merged(noted: JsonObject) -> int:
    """How often an equal action was sampled again."""
    merged = noted.get("merged", 0)
    return merged if isinstance(merged, int) else 0


def action_key(message: Message) -> tuple[object, ...]:
    """A key that is equal for equal answers: the text without white space around it, and the calls without their ids,
    and without the white space and the order of keys in their arguments.

    The whole text counts: two thoughts that end in the same ``Action:`` are two actions, because only the
    environment knows how it reads an answer.
    """
    calls = tuple((call.name, _arguments(call.arguments)) for call in message.tool_calls)
    return (message.content or "").strip(), calls


def _arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()
