"""The options that all searches share, and the log of one search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, Field, ValidationError, field_validator

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Failure, JsonObject, SamplingParams
from openhands_rl_plugin.core.validation import problems
from openhands_rl_plugin.rollout.strategies.budget import SearchBudget, StrictOptions


class BranchOptions(StrictOptions):
    """The options of all strategies that sample several answers.

    ``temperature`` makes branches differ. ``seed`` makes a search repeatable as long as no budget cuts it and no branch
    dies: a call's seed follows from it, from the episode's own where the engine says that, and from the actions before
    the call, not from concurrent calls (``None`` leaves seeds to the engine). ``sampling`` holds the other sampling
    parameters. ``turn_budget`` bounds the search for one turn, ``episode_budget`` that of all turns together; once the
    latter is spent every turn is one plain completion. A budget with fewer calls or steps than one move takes is
    refused. ``max_nodes`` bounds the tree.
    """

    sampling: SamplingParams = SamplingParams()
    temperature: float = Field(default=1.0, gt=0)
    seed: int | None = None
    turn_budget: SearchBudget = SearchBudget()
    episode_budget: SearchBudget = SearchBudget()
    max_nodes: int = Field(default=20_000, ge=1)

    @field_validator("sampling")
    @classmethod
    def _leave_what_search_sets(cls, sampling: SamplingParams) -> SamplingParams:
        for name in ("temperature", "seed"):
            if getattr(sampling, name) is not None:
                raise ValueError(f"sampling.{name} has no effect in a search: set {name} itself")
        return sampling


class SearchOptions(BranchOptions):
    """The options of the strategies that judge what they sampled.

    ``value`` names the function that judges a state. ``step_timeout`` is in seconds, for one step of a fork together
    with making it, and for closing one; in a workspace the commands' own limits count where they are longer.
    ``open_worlds`` bounds the forks held at a time.
    """

    value: str = "model"
    value_options: JsonObject = Field(default_factory=dict)
    step_timeout: float = Field(default=60.0, gt=0)
    open_worlds: int = Field(default=64, ge=1)


def checked[M: BaseModel](kind: type[M], options: Mapping[str, object]) -> M:
    """``options`` as a model. Raises ``ConfigError`` that names the wrong ones, each on a line."""
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        lines = (f"{kind.__name__}: {'.'.join(at)}: {what}" for at, what in problems(error, kind))
        raise ConfigError("\n".join(lines)) from error


def options_of[O: BranchOptions](kind: type[O], options: O | None, changes: Mapping[str, object], value: object) -> O:
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
        counts: JsonObject = {"merged": self.merged, "dropped": self.dropped, "cut_by": self.cut_by}
        judged: JsonObject = {"unjudged": self.unjudged, "undecided": self.undecided}
        failure: JsonObject = {} if self.last_failure is None else {"last_failure": self.last_failure.message}
        return {**counts, **judged, **failure, **self.extra}
