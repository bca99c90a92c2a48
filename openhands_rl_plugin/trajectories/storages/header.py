"""The fields of an episode that lists, filters and sorting use, computed in one place for all storages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeStart, NodeMark, TrajectorySummary
from openhands_rl_plugin.core.types import (
    ACTED,
    KIND,
    REWRITTEN,
    SCHEMA_VERSION,
    FailureKind,
    JsonObject,
    Node,
    PolicyRef,
    Score,
    StopReason,
    Times,
    Trajectory,
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
        policy, started = start.policy, _finite(start.id, start.started)
        return cls(
            id=start.id,
            run_id=start.run_id,
            group_id=start.group_id,
            task_id=start.task.id,
            environment=start.task.environment,
            split=start.task.split,
            strategy=start.strategy.name,
            base_model=policy.base_model,
            adapter=policy.adapter,
            policy_version=policy.version,
            stop=StopReason.UNFINISHED.value,
            failure_kind=None,
            nodes=0,
            turns=0,
            episode_return=None,
            started=started,
            finished=started,
        )

    def grown(self, spine: Spine, head: int | None, at: float) -> Self:
        """That of the episode with these nodes, which last grew at the time ``at``."""
        turns, episode_return = spine.along(head)
        known = paid_return(episode_return, self.environment)
        return self._replace(nodes=len(spine), turns=turns, episode_return=known, finished=at)

    def ended(self, spine: Spine, end: EpisodeEnd) -> Self:
        """That of the finished episode. Raises ``StorageError`` when it did not end, or its time is no number."""
        if end.stop is StopReason.UNFINISHED:
            raise StorageError(f"episode {end.trajectory_id!r} is unfinished; store it with begin() and grow()")
        grown = self.grown(spine, end.head, _finite(end.trajectory_id, end.finished))
        known = paid_return(grown.episode_return, self.environment, end.evidence)
        return grown._replace(
            episode_return=known if end.failure is None else None,
            base_model=end.policy.base_model,
            adapter=end.policy.adapter,
            policy_version=end.policy.version,
            stop=end.stop.value,
            failure_kind=None if end.failure is None else end.failure.kind.value,
            **end.usage.model_dump(),
        )

    def summary(self, reward: float | None) -> TrajectorySummary:
        """The summary for lists; ``reward`` is the newest judgement of the outcome."""
        return TrajectorySummary(
            id=self.id,
            run_id=self.run_id,
            group_id=self.group_id,
            task_id=self.task_id,
            environment=self.environment,
            split=self.split,
            strategy=self.strategy,
            policy=PolicyRef(base_model=self.base_model, adapter=self.adapter, version=self.policy_version),
            stop=StopReason(self.stop),
            failure=None if self.failure_kind is None else FailureKind(self.failure_kind),
            nodes=self.nodes,
            turns=self.turns,
            episode_return=self.episode_return,
            reward=reward,
            usage=Usage(**{name: getattr(self, name) for name in Usage.model_fields}),
            times=Times(started=self.started, finished=self.finished),
        )

    def sorting_reward(self, newest: Score | None) -> float | None:
        """The reward of filters and sorting: the newest outcome's, or the return when there is no judgement yet.

        A failed episode has none, even if it was scored.
        """
        return self.episode_return if newest is None or self.failed else newest.reward

    @property
    def failed(self) -> bool:
        """Whether it is no valid sample of the policy."""
        return self.failure_kind is not None


def paid_return(total: float | None, environment: str, evidence: JsonObject | None = None) -> float | None:
    """As ``Trajectory.known_return``: where the environment pays nothing, 0.0 only says that steps were executed."""
    return total if total or pays_rewards(environment, evidence or {}) else None


class _Vertebra(NamedTuple):
    """The fields of a node that ``acted_nodes`` looks at, and its reward."""

    parent: int | None
    sampled: bool
    reward: float | None
    simulated: bool
    metadata: JsonObject


class Spine:
    """The node fields that an episode's header depends on: parents, rewards, which nodes were sampled and executed."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._nodes: list[_Vertebra] = []
        self.extend(nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def extend(self, nodes: Iterable[Node]) -> None:
        """Append. Raises ``StorageError`` for a node that does not lie below an earlier one."""
        for node in nodes:
            at = len(self._nodes)
            if node.parent is not None and not 0 <= node.parent < at:
                raise StorageError(f"node {at} cannot be stored: its parent {node.parent} is not an earlier node")
            notes: JsonObject = {key: node.metadata[key] for key in (KIND, ACTED, REWRITTEN) if key in node.metadata}
            self._nodes.append(_Vertebra(node.parent, node.sampled, node.reward, node.simulated, notes))

    def mark(self, marks: Iterable[NodeMark]) -> None:
        """Change rewards. Raises ``StorageError`` for a mark of a node that is not there."""
        for mark in marks:
            if not 0 <= mark.index < len(self):
                raise StorageError(f"node {mark.index} cannot be marked: there are {len(self)} nodes")
            self._nodes[mark.index] = self._nodes[mark.index]._replace(reward=mark.reward, simulated=mark.simulated)

    def along(self, head: int | None) -> tuple[int, float | None]:
        """Turns and return of what was acted on, ``None`` when nothing of it was rewarded: the path to ``head``, and
        what was executed on others.

        Raises ``StorageError`` when that node is not there.
        """
        if head is not None and not 0 <= head < len(self):
            raise StorageError(f"node {head} cannot be the head: there are {len(self)} nodes")
        acted = acted_nodes(self._nodes, head)
        # Summed from the root on, as ``Trajectory.episode_return`` does, to get the same last bit.
        stepped = sorted({*path_to(self._nodes, head), *acted})
        rewards = [reward for at in stepped if (reward := self._nodes[at].reward) is not None]
        return len(acted), float(sum(rewards)) if rewards else None


def whole(start: EpisodeStart, nodes: Sequence[Node], end: EpisodeEnd) -> Trajectory:
    """A finished episode put together again."""
    if start.schema_version > SCHEMA_VERSION:
        raise newer_schema(start.id, start.schema_version)
    return Trajectory(
        schema_version=start.schema_version,
        id=start.id,
        run_id=start.run_id,
        group_id=start.group_id,
        task=start.task,
        strategy=start.strategy,
        policy=end.policy,
        nodes=tuple(nodes),
        head=end.head,
        stop=end.stop,
        tools=end.tools,
        evidence=end.evidence,
        failure=end.failure,
        usage=end.usage,
        times=Times(started=start.started, finished=end.finished),
    )


def so_far(start: EpisodeStart, nodes: Sequence[Node], head: int | None, grown: float) -> Trajectory:
    """An unfinished episode as it stands, ``grown`` last at that time. Its usage and evidence are not known yet."""
    end = EpisodeEnd(
        trajectory_id=start.id,
        head=head,
        stop=StopReason.UNFINISHED,
        policy=start.policy,
        tools=start.tools,
        finished=grown,
    )
    return whole(start, nodes, end)


def marked(nodes: Sequence[Node], marks: Iterable[NodeMark]) -> tuple[Node, ...]:
    """``nodes`` with what became known later; of two marks of one node the later one holds."""
    changed = list(nodes)
    for mark in marks:
        node = changed[mark.index]
        changed[mark.index] = node.model_copy(update=mark.changes(node))
    return tuple(changed)


def mark_fresh(node: Node, mark: NodeMark) -> None:
    """Put a mark on a node that was just made and is not shared yet; many times faster than a copy."""
    changes = mark.changes(node)
    vars(node).update(changes)
    node.__pydantic_fields_set__.update(changes)


def _finite(identity: str, seconds: float) -> float:
    if not math.isfinite(seconds):
        raise StorageError(f"episode {identity!r} cannot be stored: its times must be Unix seconds, not {seconds}")
    return seconds


def newer_schema(identity: str, version: int) -> StorageError:
    """The error of a record that a later release wrote."""
    return StorageError(
        f"record {identity!r} is of schema version {version}, newer than {SCHEMA_VERSION}; upgrade openhands_rl_plugin"
    )
