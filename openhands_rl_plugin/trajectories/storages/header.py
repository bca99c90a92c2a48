"""The fields of an episode that lists, filters and sorting use, computed in one place for all storages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeStart, NodeMark, TrajectoryFilter, TrajectorySummary
from openhands_rl_plugin.core.types import (
    SCHEMA_VERSION,
    FailureKind,
    JsonObject,
    Node,
    PolicyRef,
    Score,
    StopReason,
    Times,
    TreeNode,
    Usage,
    acted_nodes,
    path_to,
    pays_rewards,
)


class EpisodeHeader(NamedTuple):
    """One flat row. ``turns`` and ``episode_return`` are of what was acted on; the times are Unix times in seconds.

    There is no return where the episode failed, where no step was rewarded, or where the environment pays nothing.
    An unfinished episode has ``stop`` "unfinished", no usage, and as ``finished`` the time at which it last grew.
    """

    id: str
    run_id: str
    group_id: str
    task_id: str
    environment: str
    split: str
    strategy: str
    base_model: str
    adapter: str | None
    policy_version: int | None
    stop: str
    failure_kind: str | None
    nodes: int
    turns: int
    episode_return: float | None
    started: float
    finished: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0
    steps: int = 0

    @classmethod
    def begun(cls, start: EpisodeStart) -> Self:
        """That of an episode without nodes.

        Raises ``StorageError`` when its time is no number, or its id has a NUL, with which SQLite's JSON ends a text.
        """
        if "\0" in start.id:
            raise StorageError(f"episode {start.id!r} cannot be stored: its id has a NUL character; leave that out")
        task, policy, started = start.task, start.policy, _finite(start.id, start.started)
        ids = start.id, start.run_id, start.group_id, task.id, task.environment, task.split, start.strategy.name
        sampler = policy.base_model, policy.adapter, policy.version
        return cls(*ids, *sampler, StopReason.UNFINISHED.value, None, 0, 0, None, started, started)

    def grown(self, nodes: Sequence[TreeNode], head: int | None, at: float, evidence: JsonObject | None = None) -> Self:
        """That of the episode with these nodes, which last grew at the time ``at``.

        Raises ``StorageError`` when its head is not there.
        """
        if head is not None and not 0 <= head < len(nodes):
            raise StorageError(f"node {head} cannot be the head: there are {len(nodes)} nodes")
        acted = acted_nodes(nodes, head)
        # Summed from the root on, as ``Trajectory.episode_return`` does, to get the same last bit.
        stepped = sorted({*path_to(nodes, head), *acted})
        rewards = [reward for each in stepped if (reward := nodes[each].reward) is not None]
        # 0.0 only says that steps were executed, where the environment pays nothing.
        total = float(sum(rewards)) if rewards else None
        known = total if total or pays_rewards(self.environment, evidence or {}) else None
        return self._replace(nodes=len(nodes), turns=len(acted), episode_return=known, finished=at)

    def ended(self, nodes: Sequence[TreeNode], end: EpisodeEnd) -> Self:
        """That of the finished episode. Raises ``StorageError`` when it did not end, or its time is no number."""
        if end.stop is StopReason.UNFINISHED:
            raise StorageError(f"episode {end.trajectory_id!r} is unfinished; store it with begin() and grow()")
        grown = self.grown(nodes, end.head, _finite(end.trajectory_id, end.finished), end.evidence)
        if end.failure is not None:
            grown = grown._replace(episode_return=None, failure_kind=end.failure.kind.value)
        return grown._replace(
            base_model=end.policy.base_model,
            adapter=end.policy.adapter,
            policy_version=end.policy.version,
            stop=end.stop.value,
            **end.usage.model_dump(),
        )

    def summary(self, reward: float | None) -> TrajectorySummary:
        """The summary for lists; ``reward`` is the newest judgement of the outcome."""
        row = self._asdict()
        return TrajectorySummary(
            **{name: row[name] for name in TrajectorySummary.model_fields if name in row and name != "stop"},
            policy=PolicyRef(base_model=self.base_model, adapter=self.adapter, version=self.policy_version),
            stop=StopReason(self.stop),
            failure=None if self.failure_kind is None else FailureKind(self.failure_kind),
            reward=reward,
            usage=Usage(**{name: row[name] for name in Usage.model_fields}),
            times=Times(started=self.started, finished=self.finished),
        )

    def sorting_reward(self, newest: Score | None) -> float | None:
        """The reward of filters and sorting: the newest outcome's, or the return when there is no judgement yet.

        A failed episode has none, even if it was scored.
        """
        return self.episode_return if newest is None or self.failure_kind is not None else newest.reward

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.stop == StopReason.UNFINISHED


def conditions_of(where: TrajectoryFilter) -> Iterator[tuple[str, str, Any]]:
    """What a filter compares: columns, signs and values; ``ids``, ``finished``, ``failed`` and ``contains`` aside."""
    for name in EpisodeHeader._fields:
        if name not in ("id", "finished") and (value := getattr(where, name, None)) is not None:
            yield name, "=", str(value) if isinstance(value, str) else value
    bounds = ("reward", where.reward_at_least, where.reward_at_most), ("finished", where.since, where.until)
    for name, least, most in bounds:
        yield from ((name, sign, value) for sign, value in ((">=", least), ("<=", most)) if value is not None)


def joined(nodes: Sequence[Node], more: Sequence[Node] = (), marks: Iterable[NodeMark] = ()) -> list[Node]:
    """``nodes``, ``more`` of them, and what became known later; of two marks of one node the later one holds.

    Raises ``StorageError`` for a node that does not lie below an earlier one, and for a mark of one that is not there.
    """
    both = [*nodes, *more]
    for at, node in enumerate(more, len(nodes)):
        if node.parent is not None and not 0 <= node.parent < at:
            raise StorageError(f"node {at} cannot be stored: its parent {node.parent} is not an earlier node")
    for mark in marks:
        if not 0 <= mark.index < len(both):
            raise StorageError(f"node {mark.index} cannot be marked: there are {len(both)} nodes")
        both[mark.index] = both[mark.index].model_copy(update=mark.changes(both[mark.index]))
    return both


def _finite(identity: str, seconds: float) -> float:
    if not math.isfinite(seconds):
        raise StorageError(f"episode {identity!r} cannot be stored: its times must be Unix seconds, not {seconds}")
    return seconds


def newer_schema(identity: str, version: int) -> StorageError:
    """The error of a record that a later release wrote."""
    return StorageError(
        f"record {identity!r} is of schema version {version}, newer than {SCHEMA_VERSION}; upgrade openhands_rl_plugin"
    )
