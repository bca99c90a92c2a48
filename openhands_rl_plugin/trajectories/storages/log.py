"""The part that all storages share: growing episodes, scores, labels, lists and revisions, over a ``Log``.

A log holds three things: a header of each episode, which filters search; its packed content; and records (scores and
labels). Secrets are redacted before anything is written. Writes are optimistic: a writer names the state that it
changes. If another process has changed it first, nothing is written, and the writer reads again and retries.
"""

from __future__ import annotations

import asyncio
import math
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import batched, chain, product
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Protocol, Self

from backports import zstd
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, from_json, to_json

from openhands_rl_plugin.core.arrays import Floats, Ids, Mask
from openhands_rl_plugin.core.errors import DamagedError, StorageError, describe
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.messages import whole_json
from openhands_rl_plugin.core.records import (
    Columns,
    DamagedRecord,
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
    LabelKind,
    NodeMark,
    TrajectoryFilter,
    TrajectorySummary,
)
from openhands_rl_plugin.core.redaction import REDACTED, redact_nodes, redact_trajectory, redact_value
from openhands_rl_plugin.core.types import (
    TURN,
    Frozen,
    JsonObject,
    Node,
    PolicyRef,
    Score,
    StopReason,
    Times,
    Tokens,
    Trajectory,
    Usage,
    acted_nodes,
    kind_of,
    path_to,
    rewards_steps,
)

Found = tuple[Trajectory, tuple[Score, ...]]
Kind = Literal["scores", "labels"]
_RECORDS: dict[Kind, type[Any]] = {"scores": Score, "labels": Label}

# How many trajectories, or summaries, a reader holds in one batch.
_BATCH, _SUMMARIES = 8, 256
# How many open episodes are cached, so that their nodes are not read again at each growth.
_REMEMBERED = 256
WATCHED = 1000
"""A store's state has the revisions of this many open episodes, the newest."""
# Writers of one episode retry; this many conflicts in a row have another cause.
_ATTEMPTS = 20


COLUMNS = (
    *("id", "run_id", "group_id", "task_id", "environment", "split", "strategy", "base_model", "adapter"),
    *("policy_version", "stop", "failure_kind", "nodes", "turns", "episode_return", "started", "finished"),
    *Usage.model_fields,
)
"""The columns of a summary as one flat row; times are Unix times in seconds."""
_of_columns = itemgetter(*COLUMNS)


def row_of(header: TrajectorySummary) -> dict[str, Any]:
    """Convert a summary to a row: column -> value."""
    row = {**vars(header), **vars(header.policy), **vars(header.usage), **vars(header.times)}
    failure = row["failure"] and str(row["failure"])
    row |= {"policy_version": row["version"], "failure_kind": failure, "stop": str(row["stop"])}
    return dict(zip(COLUMNS, _of_columns(row), strict=True))


def header_of(values: Iterable[Any], reward: float | None = None) -> TrajectorySummary:
    """The inverse of ``row_of``, from unchecked values; ``reward`` is the newest judgement of the outcome."""
    row: dict[str, Any] = dict(zip(COLUMNS, values, strict=True))
    row |= {"version": row["policy_version"], "failure": row["failure_kind"], "reward": reward}
    kinds = {"policy": PolicyRef, "usage": Usage, "times": Times, "": TrajectorySummary}
    for field, kind in kinds.items():
        row[field] = _made(kind, set(kind.model_fields), {name: row[name] for name in kind.model_fields})
    return row[""]


def begun(start: EpisodeStart) -> TrajectorySummary:
    """The header of a new episode without nodes.

    Raises ``StorageError`` for an id with a NUL, because SQLite's JSON ends a text there.
    """
    if "\0" in start.id:
        raise StorageError(f"episode {start.id!r} cannot be stored: its id has a NUL character; leave that out")
    task, times = start.task, Times(started=start.started, finished=start.started)
    known: dict[str, Any] = {name: getattr(start, name) for name in ("id", "run_id", "group_id", "policy")}
    known |= {"task_id": task.id, "environment": task.environment, "split": task.split}
    return TrajectorySummary(**known, strategy=start.strategy.name, times=times)


def grown(
    before: TrajectorySummary, nodes: Sequence[Node], head: int | None, at: float, evidence: JsonObject | None = None
) -> TrajectorySummary:
    """The header of the episode with these nodes, which last grew at the Unix time ``at``.

    Raises ``StorageError`` if the head is not among the nodes.
    """
    if head is not None and not 0 <= head < len(nodes):
        raise StorageError(f"node {head} cannot be the head: there are {len(nodes)} nodes")
    acted = acted_nodes(nodes, head)
    stepped = sorted({*path_to(nodes, head), *acted})
    rewards = [reward for each in stepped if (reward := nodes[each].reward) is not None]
    return counted(before, len(nodes), len(acted), rewards, at, evidence)


def counted(
    header: TrajectorySummary,
    nodes: int,
    turns: int,
    rewards: Sequence[float],
    at: float,
    evidence: JsonObject | None = None,
) -> TrajectorySummary:
    """The header with these counts of nodes and turns, and with these rewards, from the root on."""
    # The same summation as ``Trajectory.episode_return``, so that the last bit is equal.
    total = float(sum(rewards)) if rewards else None
    # If the environment emits no rewards, 0.0 only marks that a step was executed.
    known = total if total or rewards_steps(header.environment, evidence or {}) else None
    times = Times(started=header.times.started, finished=at)
    return _with(header, {"nodes": nodes, "turns": turns, "episode_return": known, "times": times})


def ended(header: TrajectorySummary, nodes: Sequence[Node], end: EpisodeEnd) -> TrajectorySummary:
    """The header of the finished episode. Raises ``StorageError`` if its stop reason is ``UNFINISHED``."""
    if end.stop is StopReason.UNFINISHED:
        raise StorageError(f"episode {end.trajectory_id!r} is unfinished; store it with begin() and grow()")
    failed = {} if end.failure is None else {"failure": end.failure.kind, "episode_return": None}
    known = {"policy": end.policy, "stop": end.stop, "usage": end.usage, **failed}
    return grown(header, nodes, end.head, end.finished, end.evidence).model_copy(update=known)


def conditions_of(where: TrajectoryFilter) -> Iterator[tuple[str, str, Any]]:
    """The comparisons of a filter: column, operator, value; except ``ids``, ``finished``, ``failed``, ``contains``."""
    for name in COLUMNS:
        if name not in ("id", "finished") and (value := getattr(where, name, None)) is not None:
            yield name, "=", str(value) if isinstance(value, str) else value
    bounds = ("reward", where.reward_at_least, where.reward_at_most), ("finished", where.since, where.until)
    for name, least, most in bounds:
        yield from ((name, sign, value) for sign, value in ((">=", least), ("<=", most)) if value is not None)


def joined(nodes: Sequence[Node], more: Sequence[Node] = (), marks: Iterable[NodeMark] = ()) -> list[Node]:
    """``nodes`` and ``more``, updated by marks; of two marks of one node the later one counts.

    Raises ``StorageError`` for a node whose parent is not an earlier node, and for a mark of an unknown node.
    """
    both = [*nodes, *more]
    for at, node in enumerate(more, len(nodes)):
        if node.parent is not None and not 0 <= node.parent < at:
            raise StorageError(f"node {at} cannot be stored: its parent {node.parent} is not an earlier node")
    for mark in marks:
        if not 0 <= mark.index < len(both):
            raise StorageError(f"node {mark.index} cannot be marked: there are {len(both)} nodes")
        both[mark.index] = _with(both[mark.index], mark.changes(both[mark.index]))
    return both


def _made[Value: Frozen](kind: type[Value], known: set[str], values: dict[str, Any]) -> Value:
    """Make a model from valid values. Pydantic's constructors visit each field and take several times as long."""
    made, put = kind.__new__(kind), object.__setattr__
    put(made, "__dict__", values)
    put(made, "__pydantic_fields_set__", known)
    put(made, "__pydantic_extra__", None)
    put(made, "__pydantic_private__", None)
    return made


def _with[Value: Frozen](value: Value, changes: Mapping[str, Any]) -> Value:
    return _made(type(value), value.model_fields_set | changes.keys(), {**vars(value), **changes})


class Content(NamedTuple):
    """Stored content of an episode, or an addition to it: packed documents and nodes, and the newest head.

    ``marks`` can be read once; they raise ``ValueError`` if they are damaged.
    """

    start: bytes | None = None
    packs: Sequence[bytes] = ()
    marks: Iterable[NodeMark] = ()
    head: int | None = None
    end: bytes | None = None


class Episode(NamedTuple):
    """The state of a stored episode. ``number`` counts episodes, ``revision`` its changes; ``place`` is up to the log.

    ``damage``: why the content cannot be read.
    """

    header: TrajectorySummary
    number: int
    revision: int
    place: Any = None
    content: Content = Content()
    damage: str = ""


Values = Sequence[Score] | Sequence[Label]

Record = tuple[int, str, bytes]
"""A stored score or label: its number, its episode's id, the packed document."""

Judged = tuple[Episode, Sequence[int], Score | None]
"""An episode with a corrected header, the numbers of its scores, and the newest judgement of the outcome."""


class OvertakenError(StorageError):
    """Raised if another writer changed the episode first; the call is retried."""


class Log(Protocol):
    """The operations that a store implements. Readers see each change completely or not at all."""

    async def ids(self, where: TrajectoryFilter) -> Sequence[str]:
        """The ids of the matches, in the requested order."""
        ...

    async def count(self, where: TrajectoryFilter) -> int:
        """How many match, regardless of ``offset`` and ``limit``."""
        ...

    async def headers(self, ids: Sequence[str]) -> list[Episode]:
        """The existing episodes of ``ids``, without content, in any order."""
        ...

    async def episodes(self, ids: Sequence[str], *, unseen: bool = False) -> list[Episode]:
        """As ``headers``, with content. ``unseen``: include content that readers do not see yet, for a writer."""
        ...

    async def write(self, before: Episode | None, header: TrajectorySummary, content: Content) -> Episode:
        """Write an episode: replace it if ``content`` has a start, else append ``content`` to it.

        Returns its new state. Raises ``OvertakenError``, and changes nothing, if its state is no longer ``before``.
        """
        ...

    async def drop(self, episode: Episode) -> bool:
        """Delete an open episode with its scores and labels, unless it has changed."""
        ...

    async def add(self, values: Values, packed: Sequence[bytes]) -> None:
        """Append scores or labels. A label with a known id is ignored."""
        ...

    async def records(self, kind: Kind, ids: Sequence[str]) -> list[Record]:
        """The scores, or labels, of these episodes, oldest first."""
        ...

    async def judge(self, judged: Sequence[Judged]) -> None:
        """Store the newest judgements in the headers, so that filters find episodes by reward."""
        ...

    async def name(self, episode: Episode, names: Sequence[str], seen: int) -> None:
        """Store the label names by which filters find an episode. ``seen``: how many of its labels were read."""
        ...

    async def state(self) -> str:
        """A text that changes with every write."""
        ...


@dataclass
class _Growing:
    """The cached state of an open episode.

    ``tainted``: nodes that held a secret, or have such an ancestor; they keep no token ids. It contains ``None``, the
    parent of the roots, if a tool's description held a secret.
    """

    episode: Episode
    start: EpisodeStart
    nodes: Sequence[Node] = ()
    head: int | None = None
    tainted: frozenset[int | None] = frozenset()
    is_line: bool = True  # whether every node is the parent of the next one, and the last one is the head
    rewards: Sequence[float] = ()  # the rewards of the nodes of a line, in order

    def grow(self, more: Sequence[Node], marks: Sequence[NodeMark], head: int | None) -> TrajectorySummary:
        """Add nodes and marks, and return the new header. Raises ``StorageError``.

        On a line only the new nodes are counted: a walk over all nodes at each turn would take quadratic time.
        """
        header, known = self.episode.header, len(self.nodes)
        first = min([known, *(mark.index for mark in marks)])
        again = any(node.reward is not None for node in self.nodes[first:])
        self.nodes = joined(self.nodes, more, marks)
        below = all(node.parent == (at - 1 if at else None) for at, node in enumerate(more, known))
        self.is_line = self.is_line and below and head == (len(self.nodes) - 1 if self.nodes else None)
        if not self.is_line:
            return grown(header, self.nodes, head, time.time())
        rewards = [node.reward for node in self.nodes[0 if again else first :] if node.reward is not None]
        self.rewards = rewards if again else [*self.rewards, *rewards]
        turns = header.turns + sum(node.sampled and kind_of(node) == TURN for node in more)
        return counted(header, len(self.nodes), turns, self.rewards, time.time())


class LogStorage(ABC):
    """A ``TrajectoryStorage`` over a ``Log``, which ``_read`` and ``_change`` pass to a function."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._open: OrderedDict[str, _Growing] = OrderedDict()
        self._lost: list[DamagedRecord] | None = None

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StorageError("a storage cannot be carried over a fork; open it in the process that uses it")

    @abstractmethod
    async def _read[Answer](self, work: Callable[[Log], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the result of ``work``, which only reads. Raises ``StorageError``."""

    @abstractmethod
    async def _change[Answer](self, identity: str, work: Callable[[Log], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the result of ``work`` once its writes are durable. Writes to one episode run one at a time."""

    @abstractmethod
    async def close(self) -> None:
        """Close files and connections. The next call opens them again."""

    async def add(self, trajectory: Trajectory) -> None:
        """Store a finished episode; ignored if it is already finished. Raises ``StorageError``."""
        await self._written(trajectory.id, lambda log: self._add(log, trajectory))

    async def begin(self, start: EpisodeStart) -> None:
        """Open an episode; ignored if its id is known. Raises ``StorageError``."""
        await self._written(start.id, lambda log: self._begin(log, start))

    async def grow(self, growth: EpisodeGrowth) -> None:
        """Append to an open episode; the last call's head and marks count. Raises ``StorageError``."""
        await self._written(growth.trajectory_id, lambda log: self._grow(log, growth))

    async def end(self, end: EpisodeEnd) -> None:
        """Finish an open episode; ignored if it is already finished. Raises ``StorageError``."""
        await self._written(end.trajectory_id, lambda log: self._end(log, end))

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """Delete unfinished episodes with their scores; returns how many. Raises ``StorageError``."""
        calls = (self._change(each, lambda log, each=each: self._drop(log, each)) for each in trajectory_ids)
        return sum(await asyncio.gather(*calls))

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """Append judgements. Raises ``StorageError``."""
        if scores:
            await self._change("", lambda log: self._append(log, scores))

    async def add_labels(self, labels: Sequence[Label]) -> None:
        """Append labels; a label with a known id is ignored. Raises ``StorageError``."""
        if labels:
            await self._change("", lambda log: self._append(log, labels))

    async def labels(self, trajectory_ids: Sequence[str]) -> tuple[Label, ...]:
        """The labels of these episodes, oldest first. Raises ``StorageError``."""
        found = _parsed(Label, await self._read(lambda log: log.records("labels", trajectory_ids)), self._lost)
        return tuple(label for _, label in sorted(chain(*found.values()), key=itemgetter(0)))

    async def scores(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[Score, ...]]:
        """As in ``TrajectoryStorage``. Raises ``StorageError``."""
        found = _parsed(Score, await self._read(lambda log: log.records("scores", trajectory_ids)), self._lost)
        return {identity: tuple(score for _, score in scores) for identity, scores in found.items()}

    async def get(self, trajectory_id: str) -> Found | None:
        """One trajectory, finished or not, with its scores, oldest first, or ``None``. Raises ``StorageError``."""
        return await anext(self.find(TrajectoryFilter(ids=(trajectory_id,), finished=None)), None)

    def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        """Stream the matches with their scores, oldest first; by default in the order in which episodes began.

        Memory holds a few records at a time. Episodes added during the stream are not in it. An unfinished episode has
        its state at the time when the stream reaches it. Raises ``StorageError``, also for a damaged record.
        """
        return self._stream(where, _trajectory, _BATCH, whole=True)

    def summaries(self, where: TrajectoryFilter | None = None) -> AsyncIterator[TrajectorySummary]:
        """Like ``find``, without reading any node. Raises ``StorageError``."""
        found = self._stream(where, lambda each: TrajectorySummary(**dict(each.header)), _SUMMARIES)
        return (summary async for summary, _ in found)

    async def columns(self, where: TrajectoryFilter | None = None) -> Columns:
        """Like ``find``, but returns arrays and makes no nodes. Raises ``StorageError``."""
        found = [each async for each in self._stream(where, _column_of, _BATCH, whole=True)]
        headers, segments, whole = zip(*(made for made, _ in found), strict=True) if found else ((), (), ())
        rewards = Floats(math.nan if each.judged is None else each.judged for each in headers)
        ids, groups = [each.id for each in headers], [each.group_id for each in headers]
        return Columns(ids, groups, rewards, Ids(segments), Mask(whole))

    async def count(self, where: TrajectoryFilter | None = None) -> int:
        """How many match, regardless of ``offset`` and ``limit``. Raises ``StorageError``."""
        return await self._read(lambda log: log.count(where or TrajectoryFilter()))

    async def revision(self) -> str:
        """As in ``TrajectoryStorage``. Raises ``StorageError``."""
        return await self._read(lambda log: log.state())

    def skip_damaged(self) -> list[DamagedRecord]:
        """As in ``TrajectoryStorage``."""
        self._lost = self._lost or []
        return self._lost

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _written(self, identity: str, work: Callable[[Log], Coroutine[Any, Any, None]]) -> None:
        for _ in range(_ATTEMPTS):
            with suppress(OvertakenError):
                return await self._change(identity, work)
        raise StorageError(
            f"episode {identity!r} is written by several processes at once, again and again; let one of them write it"
        )

    async def _stream[Made](
        self, where: TrajectoryFilter | None, make: Callable[[Episode], Made], size: int, *, whole: bool = False
    ) -> AsyncIterator[tuple[Made, tuple[Score, ...]]]:
        """Stream converted matches in order; ``whole``: with content and scores. Reads them in batches."""
        asked = where or TrajectoryFilter()

        async def read(log: Log, ids: Sequence[str]) -> tuple[list[Episode], list[Record]]:
            found = await (log.episodes if whole else log.headers)(ids)
            return found, await log.records("scores", ids if whole else ())

        for ids in batched(await self._read(lambda log: log.ids(asked)), size):
            episodes, records = await self._read(lambda log, ids=ids: read(log, ids))
            made = await asyncio.to_thread(lambda episodes=episodes: dict(self._sound(episodes, make)))
            scores = _parsed(Score, (record for record in records if record[1] in made), self._lost)
            for each in ids:
                if each in made:
                    # Removed from the batch, so that its memory is freed at once.
                    yield made.pop(each), tuple(score for _, score in scores.get(each, ()))

    def _sound[Made](self, episodes: Iterable[Episode], make: Callable[[Episode], Made]) -> Iterator[tuple[str, Made]]:
        """Episode id -> the converted episode. Damaged ones raise, or are recorded and left out if skipped."""
        for each in episodes:
            try:
                yield each.header.id, make(each)
            except (StorageError, ValueError, LookupError, TypeError, OverflowError) as error:
                cause = str(error) if isinstance(error, StorageError) else f"a record is damaged: {describe(error)}"
                record = DamagedRecord(what="episode", id=each.header.id, row=each.number, cause=cause)
                _skip(self._lost, record, error)

    async def _add(self, log: Log, trajectory: Trajectory) -> None:
        trajectory = redact_trajectory(trajectory)
        self._open.pop(trajectory.id, None)
        start, end = EpisodeStart.of(trajectory), EpisodeEnd.of(trajectory)
        header = ended(begun(start), joined((), trajectory.nodes), end)
        packs, packed = _packs(trajectory.nodes), packed_end(start, end)
        await _put(log, header, Content(packed_json(start), packs, (), trajectory.head, packed))

    async def _begin(self, log: Log, start: EpisodeStart) -> None:
        clean = redact_value(start)
        episode = await _put(log, begun(clean), Content(packed_json(clean)))
        if episode is not None:
            # A secret in a tool's description is part of every prompt.
            tainted = frozenset[int | None]({None} if clean.tools != start.tools else ())
            self._remember(_Growing(episode, clean, tainted=tainted))

    async def _grow(self, log: Log, growth: EpisodeGrowth) -> None:
        identity = growth.trajectory_id
        # A strategy's metadata may hold text of an environment.
        marks = [redact_value(mark) if mark.search else mark for mark in growth.marks]
        current = await self._open_state(log, identity, growth.first)
        known = len(current.nodes)
        if not current.episode.header.open:
            if growth.first + len(growth.nodes) > known or joined(current.nodes, (), marks) != current.nodes:
                raise StorageError(f"episode {identity!r} is finished and grows no more")
            return
        if growth.first > known:
            raise StorageError(
                f"episode {identity!r} has {known} nodes and cannot grow from node {growth.first} on; "
                "store the nodes between them first"
            )
        more = growth.nodes[known - growth.first :]
        nodes, current.tainted = redact_nodes(more, first=known, tainted=current.tainted)
        header = current.grow(nodes, marks, growth.head)
        if nodes or marks or growth.head != current.head:
            content = Content(None, _packs(nodes, PASSING), marks, growth.head)
            current.episode, current.head = await log.write(current.episode, header, content), growth.head
        self._remember(current)

    async def _end(self, log: Log, end: EpisodeEnd) -> None:
        end = redact_value(end)
        current = await self._open_state(log, end.trajectory_id, 0 if end.head is None else end.head + 1)
        if current.episode.header.open:
            header = ended(current.episode.header, current.nodes, end)
            # Packed again as a whole, which is a third smaller and several times as fast to read.
            start, packs = packed_json(current.start), _packs(current.nodes)
            content = Content(start, packs, (), end.head, packed_end(current.start, end))
            await log.write(current.episode, header, content)

    async def _drop(self, log: Log, identity: str) -> bool:
        self._open.pop(identity, None)
        return any([await log.drop(each) for each in await log.headers([identity]) if each.header.open])

    async def _append(self, log: Log, values: Values) -> None:
        clean: Any = [redact_value(value) for value in values]
        await log.add(clean, [packed_json(value) for value in clean])
        kind = "scores" if isinstance(clean[0], Score) else "labels"
        await note(log, {value.trajectory_id for value in clean}, [kind])

    async def _open_state(self, log: Log, identity: str, nodes: int) -> _Growing:
        """Take the state of an open episode out of the cache, or read it. Raises ``StorageError`` for an unknown id.

        Put it back with ``_remember`` after the write; after an error it may be wrong. It is outdated if it has fewer
        ``nodes`` than the caller knows, because another process has appended some.
        """
        current = self._open.pop(identity, None)
        if current is not None and len(current.nodes) >= nodes:
            return current
        found = await log.episodes([identity], unseen=True)
        if not found:
            raise StorageError(f"episode {identity!r} is not open; begin() it first")
        start, stored = _opened(found[0])
        # Not treated as a line, because an earlier release may have counted its header differently.
        return _Growing(found[0], start, stored, found[0].content.head, _secrets_of(start, stored), is_line=False)

    def _remember(self, current: _Growing) -> None:
        self._open[current.start.id] = current
        if len(self._open) > _REMEMBERED:
            self._open.popitem(last=False)


def _packs(nodes: Sequence[Node], *level: int) -> tuple[bytes, ...]:
    return (pack_nodes(nodes, *level),) if nodes else ()


async def upgrade(log: Log) -> None:
    """Recompute counts, judgement and label names of every header.

    Headers of earlier releases are wrong: they have the newest score of any version, only the last segment of a
    condensed episode, and a session's 0 as its return; they lack label names. Damage is reported when it is read.
    """
    ids = await log.ids(TrajectoryFilter(finished=None))
    for identity in ids:
        with suppress(StorageError, ValueError, LookupError, TypeError):
            (episode,) = await log.episodes([identity])
            trajectory = _trajectory(episode)
            if trajectory.stop is not StopReason.UNFINISHED:
                header = ended(episode.header, trajectory.nodes, EpisodeEnd.of(trajectory))
                await log.judge([(episode._replace(header=header), (), None)])
    await note(log, ids)


async def _put(log: Log, header: TrajectorySummary, content: Content) -> Episode | None:
    """Store an episode if its id is unknown, or if it is finished and the stored one is not."""
    before = next(iter(await log.headers([header.id])), None)
    if before is not None and (content.end is None or not before.header.open):
        return None
    episode = await log.write(before, header, content)
    if before is None:
        await note(log, [header.id])
    return episode


async def note(log: Log, ids: Iterable[str], kinds: Sequence[Kind] = ("scores", "labels")) -> None:
    """Write the newest judgement and the label names into every header.

    Label names are the kinds of the valid labels and the texts of tags. Damage is reported when it is read.
    """
    for some, kind in product(batched(ids, 1000), kinds):
        found = _parsed(_RECORDS[kind], await log.records(kind, some), [])
        judged: list[Judged] = []
        for episode in await log.headers(list(found)) if found else ():
            numbers, own = zip(*found[episode.header.id], strict=True)
            if kind == "scores":
                judged.append((episode, numbers, newest_outcome(own)))
                continue
            gone = {each.withdraws for each in own}
            held = [each for each in own if each.withdraws is None and each.id not in gone]
            names = {each.text if each.kind is LabelKind.TAG else each.kind.value for each in held}
            await log.name(episode, sorted(names), len(own))
        if judged:
            await log.judge(judged)


def _parsed[Value: (Score, Label)](
    kind: type[Value], records: Iterable[Record], lost: list[DamagedRecord] | None
) -> dict[str, list[tuple[int, Value]]]:
    """Episode id -> its scores, or labels, with their numbers, oldest first.

    A damaged record is added to ``lost``, or is an error without ``lost``.
    """
    found: dict[str, list[tuple[int, Value]]] = defaultdict(list)
    for number, identity, document in records:
        try:
            found[identity].append((number, parsed_json(kind, identity, document)))
        except (DamagedError, ValueError, AttributeError) as error:
            _skip(lost, DamagedRecord(what=kind.__name__.lower(), id=identity, row=number, cause=str(error)), error)
    return found


def _skip(lost: list[DamagedRecord] | None, record: DamagedRecord, error: Exception) -> None:
    """Record a damaged record, once. Raises ``DamagedError`` if damage is not skipped."""
    if lost is None:
        raise DamagedError(record.in_words()) from error
    if not any((each.what, each.id, each.row) == (record.what, record.id, record.row) for each in lost):
        lost.append(record)


def _opened(episode: Episode) -> tuple[EpisodeStart, list[Node]]:
    identity, content = episode.header.id, episode.content
    if episode.damage or content.start is None:
        raise DamagedError(episode.damage or f"the documents of {identity!r} are missing; restore a backup")
    start = parsed_json(EpisodeStart, identity, content.start)
    if start.id != identity:
        raise DamagedError(f"trajectory {start.id!r} stands under {identity!r}; restore a backup")
    nodes = [node for pack in content.packs for node in unpack_nodes(pack)]
    return start, joined(nodes, (), content.marks)


def _trajectory(episode: Episode) -> Trajectory:
    header, content = episode.header, episode.content
    start, nodes = _opened(episode)
    if len(nodes) != header.nodes or (content.end is None and not header.open):
        raise DamagedError(f"trajectory {header.id!r} has {len(nodes)} of {header.nodes} nodes; restore a backup")
    if content.end is not None:
        end = parsed_end(start, content.end)
    else:
        known = {"head": content.head, "policy": start.policy, "tools": start.tools, "finished": header.times.finished}
        end = EpisodeEnd(trajectory_id=start.id, stop=StopReason.UNFINISHED, **known)
    times = Times(started=start.started, finished=end.finished)
    values = vars(start) | vars(end) | {"nodes": tuple(nodes), "times": times}
    return _made(Trajectory, set(Trajectory.model_fields), {name: values[name] for name in Trajectory.model_fields})


def _column_of(episode: Episode) -> tuple[TrajectorySummary, int, bool]:
    """The number of segments, and whether all completions have tokens, from the layout of the packs."""
    segments, whole = 0, episode.header.failure is None and not episode.damage
    for pack in episode.content.packs:
        data = _decompress(pack, _NODES)
        count, size, *_ = _HEADER.unpack_from(data)
        layout, at = struct.unpack_from(f"<{4 * count}I", data, _HEADER.size), _HEADER.size + 16 * count
        segments += layout[::4].count(_HAS_TOKENS)
        text = data[at : at + size]
        lacking = any(b'"%s":' % key in text for key in (b"missing", b"unknown_before")) or layout[2::4] != layout[3::4]
        whole = whole and not lacking and count - layout[::4].count(0) == text.count(b'"sampled":true')
    return episode.header, segments, whole


def _secrets_of(start: EpisodeStart, nodes: Sequence[Node]) -> frozenset[int | None]:
    """The tainted nodes: their text has the mark of a redacted secret, and they have no token ids."""
    clean = {up for at, node in enumerate(nodes) if node.tokens for up in path_to(nodes, at)}
    tainted: set[int | None] = {None} if not clean and any(REDACTED in str(tool) for tool in start.tools) else set()
    for at, node in enumerate(nodes):
        if at not in clean and (node.parent in tainted or REDACTED in node.model_dump_json(exclude={"tokens"})):
            tainted.add(at)
    return frozenset(tainted)


# --- Packing
#
# Nodes and documents as compressed bytes with a checksum. A pack has its own version; unpacking is lossless.
#
# A pack is one version byte and one zstd frame with a checksum. The frame of nodes holds, one after the other and each
# in blocks of its own (text and token ids have different statistics):
#
# - a header: the number of nodes, the bytes of JSON, and the widths of the two arrays;
# - for each node whether it has tokens, whether they extend, and how many prompt ids, sampled ids and logprobs;
# - the nodes without tokens, as one JSON list without the fields that have their default;
# - all token ids in order, as numbers of 16 or 32 bits;
# - all logprobs in order, as 32-bit floats, the most significant bytes first; in packs of earlier releases also 64-bit
#   ones, which are read with the precision of 32.

UNPACKED_LIMIT = 512 * 1024 * 1024
"""The most bytes that a pack may unpack to, whatever its header claims."""

_NODES, _DOCUMENT = 1, 2  # version bytes; later formats take other numbers

_HEADER = struct.Struct("<IIBB")
_FLOAT = 4
_HAS_TOKENS, _EXTENDS = 1, 2

_LEVEL_OF, _CHECKED = zstd.CompressionParameter.compression_level, zstd.CompressionParameter.checksum_flag
_LEVEL = 3
PASSING = 1
"""The zstd level for content that is soon packed again."""
# Creating a compressor costs as much as a small pack, and threads cannot share one.
_compressors = threading.local()
_TOKENS = set(Tokens.model_fields)
_NODE_LIST = TypeAdapter(tuple[Node, ...])


def pack_nodes(nodes: Sequence[Node], level: int = _LEVEL) -> bytes:
    """Pack all ``nodes``. Raises ``StorageError`` for values that JSON cannot hold, and above the size limit."""
    layout: list[int] = []
    ids: list[bytes] = []
    logprobs: list[bytes] = []
    for node in nodes:
        if (tokens := node.tokens) is None:
            layout.extend((0, 0, 0, 0))
            continue
        flags = _HAS_TOKENS | (_EXTENDS if tokens.extends else 0)
        layout.extend((flags, len(tokens.prompt_ids), len(tokens.sampled_ids), len(tokens.logprobs)))
        ids += bytes(tokens.prompt_ids), bytes(tokens.sampled_ids)
        logprobs.append(bytes(tokens.logprobs))
    whole, floats = b"".join(ids), b"".join(logprobs)
    width = 4 if whole[2::4].strip(b"\0") or whole[3::4].strip(b"\0") else 2
    planes = [floats[byte::_FLOAT] for byte in reversed(range(_FLOAT))]
    text = b"[%s]" % b",".join([json_of(node, exclude={"tokens"}, exclude_defaults=True) for node in nodes])
    header = _HEADER.pack(len(nodes), len(text), width, _FLOAT) + struct.pack(f"<{len(layout)}I", *layout)
    return _compress(_NODES, [header + text, _widened(whole, 4, width), planes[0], b"".join(planes[1:])], level)


def unpack_nodes(blob: bytes) -> tuple[Node, ...]:
    """The inverse of ``pack_nodes``. Raises ``StorageError`` for a damaged pack and for one of a later format."""
    data = memoryview(_decompress(blob, _NODES))
    try:
        count, text_bytes, width, precision = _HEADER.unpack_from(data)
        at = _HEADER.size
        layout = struct.unpack_from(f"<{4 * count}I", data, at)
        at += 4 * len(layout)
        nodes = _NODE_LIST.validate_json(bytes(data[at : (at := at + text_bytes)]))
        held = data[at : (at := at + width * (sum(layout[1::4]) + sum(layout[2::4])))]
        logprobs = _floats_in(data[at : (at := at + precision * sum(layout[3::4]))], precision)
        if at != len(data) or len(nodes) != count or width not in (2, 4):
            raise ValueError("its parts do not have the lengths that its header says")
        ids = _widened(bytes(held), width, 4)
        used = scored = 0
        for node, (flags, prompt, sampled, floats) in zip(nodes, batched(layout, 4), strict=True):
            if flags:
                # No validation: the arrays hold only numbers, and the node is not shared yet.
                arrays = {
                    "extends": bool(flags & _EXTENDS),
                    "prompt_ids": Ids(ids[used : (used := used + 4 * prompt)]),
                    "sampled_ids": Ids(ids[used : (used := used + 4 * sampled)]),
                    "logprobs": Floats(logprobs[scored : (scored := scored + 4 * floats)]),
                }
                vars(node)["tokens"] = _made(Tokens, _TOKENS, arrays)
                node.__pydantic_fields_set__.add("tokens")
        return nodes
    except (ValueError, KeyError, struct.error) as error:
        raise DamagedError(f"packed nodes are damaged: {describe(error)}") from error


def pack_document(document: bytes) -> bytes:
    """Compress a JSON document, with a checksum. Raises ``StorageError`` above the size limit."""
    return _compress(_DOCUMENT, [document])


def unpack_document(blob: bytes) -> bytes:
    """The inverse of ``pack_document``. Raises ``StorageError`` for a damaged pack and for one of a later format."""
    return _decompress(blob, _DOCUMENT)


def json_of(value: Frozen, **how: Any) -> bytes:
    """Serialise a value to JSON, with U+FFFD for a lone surrogate. Raises ``StorageError`` if JSON cannot hold it."""
    try:
        with suppress(PydanticSerializationError):
            # Calls the serializer directly: for a small node ``model_dump_json`` takes twice the time.
            return _readable(value.__pydantic_serializer__.to_json(value, **how))
        return _readable(to_json(whole_json(value.model_dump(**how)), inf_nan_mode="strings"))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{type(value).__name__} cannot be written as JSON: {describe(error)}") from error


def _readable(document: bytes) -> bytes:
    """Return the document. Raises ``ValueError`` if an export, with 20 more levels, would be too deep to read."""
    # Cheap test first: hardly any document has so many brackets, even with those in texts.
    if document.count(b"[") + document.count(b"{") > 180:
        from_json(b"[" * 20 + document + b"]" * 20)
    return document


def _widened(numbers: bytes, width: int, wanted: int) -> bytes:
    """Convert numbers of ``width`` bytes to ``wanted`` bytes; the removed bytes are 0."""
    if width == wanted:
        return numbers
    made = bytearray(len(numbers) // width * wanted)
    for byte in range(min(width, wanted)):
        made[byte::wanted] = numbers[byte::width]
    return bytes(made)


def _floats_in(data: memoryview, width: int) -> bytes:
    count = len(data) // width
    raw = bytearray(len(data))
    for place, byte in enumerate(reversed(range(width))):
        raw[byte::width] = data[place * count : (place + 1) * count]
    return bytes(raw) if width == _FLOAT else bytes(Floats(struct.unpack(f"<{count}d", raw)))


def _compress(version: int, parts: Sequence[bytes], level: int = _LEVEL) -> bytes:
    size = sum(map(len, parts))
    if size > UNPACKED_LIMIT:
        raise StorageError(f"{size:,} bytes are more than one record may have ({UNPACKED_LIMIT:,}): shorten its texts")
    held: dict[Any, Any] = vars(_compressors)
    # After an error it is not reused, because its frame is incomplete.
    compressor = held.pop(level, None) or zstd.ZstdCompressor(options={_LEVEL_OF: level, _CHECKED: 1})
    compressor.set_pledged_input_size(size)
    packed = [compressor.compress(part, zstd.ZstdCompressor.FLUSH_BLOCK) for part in parts if part]
    packed.append(compressor.flush(zstd.ZstdCompressor.FLUSH_FRAME))
    held[level] = compressor
    return b"".join((bytes((version,)), *packed))


def _decompress(blob: bytes, version: int) -> bytes:
    if blob[:1] != bytes((version,)):
        found = blob[0] if blob else "none"
        raise DamagedError(
            f"a record is in format {found}, not {version}: it is damaged, or a later openhands_rl_plugin wrote it; "
            "upgrade openhands_rl_plugin, or restore the file from a backup"
        )
    decompressor = zstd.ZstdDecompressor()
    try:
        data = decompressor.decompress(memoryview(blob)[1:], UNPACKED_LIMIT)
    except zstd.ZstdError as error:
        raise DamagedError(f"a record is damaged, restore the file from a backup: {describe(error)}") from error
    if not decompressor.eof or decompressor.unused_data:
        raise DamagedError(f"a record is damaged or larger than {UNPACKED_LIMIT:,} bytes; restore it from a backup")
    return data


def packed_json(value: Frozen, without: frozenset[str] = frozenset()) -> bytes:
    """Serialise and compress a value. Raises ``StorageError`` if JSON cannot hold it."""
    return pack_document(json_of(value, exclude=set(without)))


def parsed_json[Value: Frozen](kind: type[Value], identity: str, packed: bytes) -> Value:
    """The inverse of ``packed_json``. Raises ``StorageError`` for damaged data, and for data of a later release."""
    try:
        return kind.model_validate_json(unpack_document(packed))
    except ValidationError as error:
        later = "it is damaged, or a later openhands_rl_plugin wrote it"
        raise DamagedError(f"record {identity!r} is no {kind.__name__}, {later}: {describe(error)}") from error


def packed_end(start: EpisodeStart, end: EpisodeEnd) -> bytes:
    """Pack the end of an episode, without the fields that its start already has."""
    return packed_json(end, without=frozenset({"tools"} if end.tools == start.tools else ()))


def parsed_end(start: EpisodeStart, packed: bytes) -> EpisodeEnd:
    """The inverse of ``packed_end``. Raises ``StorageError``."""
    end = parsed_json(EpisodeEnd, start.id, packed)
    return end if "tools" in end.model_fields_set else end.model_copy(update={"tools": start.tools})
