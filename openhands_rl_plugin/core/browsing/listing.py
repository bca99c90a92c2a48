"""What a list of episodes shows beside their summaries: how many have which value, and what has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from openhands_rl_plugin.core.browsing.terms import Column, Term
from openhands_rl_plugin.core.records import Label, TrajectoryFilter, TrajectorySummary
from openhands_rl_plugin.core.types import Frozen, PolicyRef, Score


class FacetCount(Frozen):
    """So many episodes have this value; ``None``: none. That of an adapter is ``NAME@VERSION``."""

    value: str | None
    count: int


class PolicyTokens(Frozen):
    """What the episodes of one policy took: tokens of prompts (each call's whole one) and of completions."""

    policy: PolicyRef
    episodes: int
    prompt_tokens: int
    completion_tokens: int


class RewardHistogram(Frozen):
    """Counts of rewards in bins of one width between ``low`` and ``high`` (both inclusive); ``unknown`` have none."""

    low: float | None = None
    high: float | None = None
    counts: tuple[int, ...] = ()
    unknown: int = 0


class StoreChanges(Frozen):
    """What happened in a store since a cursor: ids of episodes, each at most once in a field, and the next ``cursor``.

    ``more``: so much that some is left out; look at everything again.
    """

    cursor: str
    began: tuple[str, ...] = ()
    grew: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    gone: int = 0
    scored: tuple[str, ...] = ()
    labelled: tuple[str, ...] = ()
    more: bool = False

    @property
    def any(self) -> bool:
        """Whether anything happened."""
        return bool(self.began or self.grew or self.ended or self.gone or self.scored or self.labelled or self.more)


def value_of(summary: TrajectorySummary, column: Column) -> str | float | None:
    """What a term looks at."""
    usage, times, policy = summary.usage, summary.times, summary.policy
    failure = None if summary.failure is None else summary.failure.value
    judged = summary.episode_return if summary.reward is None else summary.reward
    values: dict[Column, str | float | None] = {
        Column.ID: summary.id,
        Column.RUN: summary.run_id,
        Column.GROUP: summary.group_id,
        Column.TASK: summary.task_id,
        Column.ENVIRONMENT: summary.environment,
        Column.SPLIT: summary.split,
        Column.STRATEGY: summary.strategy,
        Column.MODEL: policy.base_model,
        Column.ADAPTER: policy.adapter,
        Column.VERSION: policy.version,
        Column.STOP: summary.stop.value,
        Column.FAILED: failure,
        Column.REWARD: None if failure else judged,
        Column.RETURN: summary.episode_return,
        Column.NODES: summary.nodes,
        Column.TURNS: summary.turns,
        Column.TOKENS: usage.prompt_tokens + usage.completion_tokens,
        Column.CALLS: usage.calls,
        Column.STEPS: usage.steps,
        Column.SECONDS: times.finished - times.started,
        Column.STARTED: times.started,
        Column.FINISHED: times.finished,
    }
    return values[column]


def matches(summary: TrajectorySummary, terms: Iterable[Term]) -> bool:
    """Whether all terms hold."""
    return all(term.holds(value_of(summary, term.column), summary.policy.version) for term in terms)


@runtime_checkable
class Browsable(Protocol):
    """A storage that many can look through at once. A capability, not a flag; all methods may raise ``StorageError``.

    Example:
        >>> from openhands_rl_plugin import FileTrajectoryStorage
        >>> isinstance(FileTrajectoryStorage("./trajectories"), Browsable)
        True
    """

    async def facets(self, where: TrajectoryFilter, by: Sequence[Column], most: int) -> list[tuple[FacetCount, ...]]:
        """For each column the ``most`` frequent values of the matches (``offset``, ``limit``, ``after`` aside)."""
        ...

    async def rewards(self, where: TrajectoryFilter, bins: int) -> RewardHistogram:
        """How the rewards of the matches are distributed."""
        ...

    async def tokens(self, where: TrajectoryFilter) -> tuple[PolicyTokens, ...]:
        """What the matches took, by the policy that they were begun with."""
        ...

    async def changed_since(self, cursor: str | None) -> StoreChanges:
        """What happened since; nothing for ``None``. Of unfinished episodes the newest are looked at.

        Raises ``StorageError`` for a cursor that is none of this store's.
        """
        ...

    async def all_labels(self) -> tuple[Label, ...]:
        """Every label of the store, oldest first."""
        ...

    async def revision(self, trajectory_id: str | None = None) -> str:
        """A text that is another one when this episode, or anything in the store, has changed."""
        ...


@runtime_checkable
class ReadsScores(Protocol):
    """A storage that reads scores without their episodes. A capability, not a flag; it may raise ``StorageError``."""

    async def scores(self, trajectory_ids: Sequence[str]) -> Mapping[str, tuple[Score, ...]]:
        """Id -> its scores, oldest first, of those that have some."""
        ...
