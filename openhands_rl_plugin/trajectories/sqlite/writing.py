"""Every change to the SQLite file of a store, inside of transactions that the caller opens and ends."""

from __future__ import annotations

import math
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.judgements import is_opinion
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart, Label, NodeMark
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.trajectories.sqlite.conditions import NO_RETURN, UNFINISHED
from openhands_rl_plugin.trajectories.sqlite.database import JUDGE, judged_columns
from openhands_rl_plugin.trajectories.sqlite.reading import (
    HEADER_COLUMNS,
    header_from,
    read_nodes,
    read_start,
    stored_outcome,
)
from openhands_rl_plugin.trajectories.storages.header import EpisodeHeader, Spine, marked, paid_return
from openhands_rl_plugin.trajectories.storages.packing import PackedNodes, pack_in_chunks, packed_end, packed_json

# So many open episodes are remembered, which spares reading their nodes again whenever they grow.
_REMEMBERED = 256

_INSERT = (
    f"INSERT INTO episodes ({HEADER_COLUMNS}, head, scored, score, reward) "
    f"VALUES ({', '.join('?' * (len(EpisodeHeader._fields) + 4))})"
)
_UPDATE = f"UPDATE episodes SET {', '.join(f'{name} = ?' for name in EpisodeHeader._fields)}"


class PackedTrajectory(NamedTuple):
    """A finished trajectory as it is stored."""

    header: EpisodeHeader
    head: int | None
    start: bytes
    end: bytes
    chunks: tuple[PackedNodes, ...]


class _Standing(NamedTuple):
    """Where an episode stands before it is changed. ``revision`` counts how often it has grown."""

    row: int
    finished: bool
    revision: int
    environment: str


def packed_trajectory(trajectory: Trajectory) -> PackedTrajectory:
    """Ready to be stored. Raises ``StorageError`` for an unfinished one and for nodes that are no tree."""
    start, end = EpisodeStart.of(trajectory), EpisodeEnd.of(trajectory)
    header = EpisodeHeader.begun(start).ended(Spine(trajectory.nodes), end)
    chunks = tuple(pack_in_chunks(trajectory.nodes))
    return PackedTrajectory(header, trajectory.head, packed_json(start), packed_end(start, end), chunks)


def packed_start(start: EpisodeStart) -> tuple[EpisodeStart, bytes]:
    """The beginning of an episode, ready to be stored. Raises ``StorageError``."""
    return start, packed_json(start)


def packed_growth(growth: EpisodeGrowth) -> tuple[EpisodeGrowth, tuple[PackedNodes, ...]]:
    """A growth, ready to be stored. Raises ``StorageError``."""
    return growth, tuple(pack_in_chunks(growth.nodes, growth.first))


def packed_labels(labels: Sequence[Label]) -> list[tuple[Label, bytes]]:
    """Labels, ready to be stored. Raises ``StorageError``."""
    return [(label, packed_json(label)) for label in labels]


def packed_scores(scores: Sequence[Score]) -> list[tuple[Score, bytes]]:
    """Judgements, ready to be stored. Raises ``StorageError``."""
    return [(score, packed_json(score)) for score in scores]


class SqliteEpisodeWriter:
    """The only one that changes the tables. A method that raises may have written a part, which the caller undoes.

    One that outlives a failed transaction would remember what was undone: make a new one then.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._spines: OrderedDict[int, tuple[int, Spine]] = OrderedDict()

    def add(self, packed: PackedTrajectory) -> None:
        """Store a finished episode, in the place of an unfinished one of the same id."""
        standing = self._find(packed.header.id)
        if standing is None:
            row = self._insert(packed.header, packed.head)
        elif standing.finished:
            return
        else:
            row = standing.row
            self._empty(row)
            self._update(row, packed.header, packed.head)
        self._connection.execute("INSERT INTO documents VALUES (?, ?, ?)", (row, packed.start, packed.end))
        self._append(row, packed.chunks)

    def begin(self, packed: tuple[EpisodeStart, bytes]) -> None:
        """Open an episode, unless its id is known."""
        start, document = packed
        if self._find(start.id) is None:
            row = self._insert(EpisodeHeader.begun(start), None)
            self._connection.execute("INSERT INTO documents VALUES (?, ?, NULL)", (row, document))
            self._remember(row, 0, Spine())

    def grow(self, packed: tuple[EpisodeGrowth, Sequence[PackedNodes]]) -> None:
        """Append nodes and marks."""
        growth, chunks = packed
        standing = self._known(growth.trajectory_id)
        if standing.finished:
            self._check_nothing_new(standing, growth)
            return
        spine = self._spine(standing, growth.trajectory_id)
        known = len(spine)
        if growth.first > known:
            raise StorageError(
                f"episode {growth.trajectory_id!r} has {known} nodes and cannot grow from node {growth.first} on; "
                "store the nodes between them first"
            )
        new = growth.nodes[known - growth.first :]
        if len(new) < len(growth.nodes):
            chunks = list(pack_in_chunks(new, known))
        spine.extend(new)
        spine.mark(growth.marks)
        turns, total = spine.along(growth.head)
        episode_return = paid_return(total, standing.environment)
        self._append(standing.row, chunks)
        self._mark(standing.row, growth.marks)
        self._connection.execute(
            "UPDATE episodes SET nodes = ?, turns = ?, episode_return = ?, finished = ?, head = ?, "
            "revision = revision + 1, reward = iif(scored, reward, ?) WHERE row = ?",
            (len(spine), turns, _told_return(episode_return), time.time(), growth.head, episode_return, standing.row),
        )
        self._remember(standing.row, standing.revision + 1, spine)

    def end(self, end: EpisodeEnd) -> None:
        """Close an episode, unless it is closed already."""
        standing = self._known(end.trajectory_id)
        if standing.finished:
            return
        query = f"SELECT {HEADER_COLUMNS} FROM episodes WHERE row = ?"
        header = header_from(self._connection.execute(query, (standing.row,)).fetchone())
        self._update(standing.row, header.ended(self._spine(standing, end.trajectory_id), end), end.head)
        document = packed_end(read_start(self._connection, standing.row, end.trajectory_id), end)
        self._connection.execute("UPDATE documents SET end = ? WHERE episode = ?", (document, standing.row))

    def drop(self, trajectory_ids: Sequence[str]) -> int:
        """Forget unfinished episodes, with their scores."""
        dropped = 0
        for identity in trajectory_ids:
            standing = self._find(identity)
            if standing is not None and not standing.finished:
                self._empty(standing.row)
                self._connection.execute("DELETE FROM episodes WHERE row = ?", (standing.row,))
                for table in ("scores", "labels"):
                    self._connection.execute(f"DELETE FROM {table} WHERE trajectory_id = ?", (identity,))
                dropped += 1
        return dropped

    def add_scores(self, packed: Sequence[tuple[Score, bytes]]) -> None:
        """Append judgements; the newest outcome of an episode decides by which reward it is found and sorted."""
        for score, document in packed:
            self._connection.execute(
                "INSERT INTO scores (trajectory_id, score) VALUES (?, ?)", (score.trajectory_id, document)
            )
            if not is_opinion(score.reward_version):
                # Without a reward it withdraws what its version said before.
                known = score.reward is not None
                newest = score if known else stored_outcome(self._connection, score.trajectory_id)
                self._connection.execute(JUDGE, (*judged_columns(newest), score.trajectory_id))

    def add_labels(self, packed: Sequence[tuple[Label, bytes]]) -> None:
        """Append labels, each once."""
        for label, document in packed:
            self._connection.execute(
                "INSERT OR IGNORE INTO labels (id, trajectory_id, label) VALUES (?, ?, ?)",
                (label.id, label.trajectory_id, document),
            )

    def _find(self, identity: str) -> _Standing | None:
        query = f"SELECT row, NOT {UNFINISHED}, revision, environment FROM episodes WHERE id = ?"
        found = self._connection.execute(query, (identity,)).fetchone()
        return None if found is None else _Standing._make(found)

    def _known(self, identity: str) -> _Standing:
        standing = self._find(identity)
        if standing is None:
            raise StorageError(f"episode {identity!r} is not open; begin() it first")
        return standing

    def _insert(self, header: EpisodeHeader, head: int | None) -> int:
        newest = stored_outcome(self._connection, header.id)
        values = (head, *judged_columns(newest)[:2], header.sorting_reward(newest))
        row = self._connection.execute(_INSERT, (*_columns(header), *values)).lastrowid
        assert row is not None
        return row

    def _update(self, row: int, header: EpisodeHeader, head: int | None) -> None:
        self._spines.pop(row, None)
        self._connection.execute(
            f"{_UPDATE}, head = ?, revision = revision + 1, reward = iif(scored AND NOT ?, reward, ?) WHERE row = ?",
            (*_columns(header), head, header.failed, header.sorting_reward(None), row),
        )

    def _empty(self, row: int) -> None:
        """Remove an unfinished episode's records beside its row."""
        self._spines.pop(row, None)
        for table in ("documents", "chunks", "marks"):
            self._connection.execute(f"DELETE FROM {table} WHERE episode = ?", (row,))

    def _append(self, row: int, chunks: Sequence[PackedNodes]) -> None:
        for chunk in chunks:
            self._connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?)", (row, *chunk))

    def _mark(self, row: int, marks: Sequence[NodeMark]) -> None:
        for mark in marks:
            text = mark.model_dump_json(exclude_defaults=True)
            self._connection.execute("INSERT OR REPLACE INTO marks VALUES (?, ?, ?)", (row, mark.index, text))

    def _spine(self, standing: _Standing, identity: str) -> Spine:
        """Taken out of what is remembered, because after an error it may be wrong; put it back when all is written."""
        revision, spine = self._spines.pop(standing.row, (None, Spine()))
        if revision == standing.revision:
            return spine
        return Spine(read_nodes(self._connection, standing.row, identity))

    def _remember(self, row: int, revision: int, spine: Spine) -> None:
        self._spines[row] = revision, spine
        if len(self._spines) > _REMEMBERED:
            self._spines.popitem(last=False)

    def _check_nothing_new(self, standing: _Standing, growth: EpisodeGrowth) -> None:
        nodes = read_nodes(self._connection, standing.row, growth.trajectory_id)
        known = all(0 <= mark.index < len(nodes) for mark in growth.marks)
        if growth.first + len(growth.nodes) > len(nodes) or not known or marked(nodes, growth.marks) != nodes:
            raise StorageError(f"episode {growth.trajectory_id!r} is finished and grows no more")


def _columns(header: EpisodeHeader) -> tuple[object, ...]:
    return header._replace(episode_return=_told_return(header.episode_return))


def _told_return(value: float | None) -> float | str:
    if value is None:
        return NO_RETURN
    # SQLite makes NULL of a NaN, and keeps text in a column that has no type.
    return "nan" if math.isnan(value) else value
