"""Every question to the SQLite file of a store. Each call sees one state of it, whatever is written meanwhile."""

from __future__ import annotations

import re
import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from openhands_rl_plugin.core.errors import DamagedError, StorageError
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.records import (
    DamagedRecord,
    EpisodeStart,
    Label,
    NodeMark,
    StoreChanges,
    TrajectoryFilter,
    TrajectorySummary,
)
from openhands_rl_plugin.core.types import Node, Score, Trajectory
from openhands_rl_plugin.trajectories.sqlite.conditions import (
    NO_RETURN,
    UNFINISHED,
    after_of,
    condition_of,
    is_of_all,
    is_reversed,
    one_value,
    order_of,
    query_of_all,
)
from openhands_rl_plugin.trajectories.storages.header import EpisodeHeader, mark_fresh, so_far, whole
from openhands_rl_plugin.trajectories.storages.packing import (
    cursor_lost,
    note_lost,
    parsed_end,
    parsed_json,
    unpack_nodes,
)

Found = tuple[Trajectory, tuple[Score, ...]]

HEADER_COLUMNS = ", ".join(EpisodeHeader._fields)


class _Episode(NamedTuple):
    row: int
    id: str
    stop: str
    nodes: int
    head: int | None
    finished: float
    start: bytes | None
    end: bytes | None


def row_numbers(connection: sqlite3.Connection, where: TrajectoryFilter) -> array[int]:
    """The rows of the matches, in the requested order: 8 bytes each, however many there are."""
    condition, values = condition_of(where)
    with one_state(connection):
        after = after_of(connection, where)
        if is_of_all(where, condition):
            total = count(connection, where)
            found = array("q", (row for row, _ in connection.execute(*query_of_all(where, after, total))))
            return found[::-1] if is_reversed(where, total) else found
    at, more = " OR ".join(condition for condition, _ in after), [value for _, each in after for value in each]
    limit = -1 if where.limit is None else where.limit
    query = f"SELECT row FROM episodes WHERE {condition} AND ({at}) ORDER BY {order_of(where)} LIMIT ? OFFSET ?"
    found = connection.execute(query, (*values, *more, limit, where.offset))
    return array("q", (row for (row,) in found))


def count(connection: sqlite3.Connection, where: TrajectoryFilter) -> int:
    """How many match, ``offset`` and ``limit`` aside."""
    condition, values = condition_of(where)
    return connection.execute(f"SELECT count(*) FROM episodes WHERE {condition}", values).fetchone()[0]


def load(connection: sqlite3.Connection, rows: Sequence[int], lost: list[DamagedRecord] | None = None) -> list[Found]:
    """The trajectories of ``rows`` with their scores, in that order; rows that are gone are left out.

    Damaged scores are left out and noted in ``lost`` if it is given, here and in what follows.
    """
    with one_state(connection):
        episodes = {
            episode.row: episode
            for episode in map(
                _Episode._make,
                connection.execute(
                    "SELECT row, id, stop, nodes, head, finished, documents.start, documents.end "
                    f"FROM episodes LEFT JOIN documents ON episode = row WHERE row IN {_slots(rows)}",
                    rows,
                ),
            )
        }
        chunks, marks = _chunks(connection, rows), _marks(connection, rows)
        scores = _scores(connection, [episode.id for episode in episodes.values()], lost)
    present = [episodes[row] for row in rows if row in episodes]
    return [(_trajectory(each, _nodes(chunks[each.row], marks[each.row])), tuple(scores[each.id])) for each in present]


def damage(connection: sqlite3.Connection) -> str | None:
    """A page of the headers, of the marks or of their indices that is damaged: SQLite may then leave out rows without
    a word. Reads these tables once, and no nodes."""
    for table in ("episodes", "marks"):
        (found,) = connection.execute(f"PRAGMA integrity_check({table})").fetchone()
        if found != "ok":
            return f"in the table {table}: {found.splitlines()[0]}"
    return None


def load_summaries(connection: sqlite3.Connection, rows: Sequence[int]) -> list[TrajectorySummary]:
    """The summaries of ``rows``, in that order; rows that are gone are left out."""
    query = f"SELECT row, score, {HEADER_COLUMNS} FROM episodes WHERE row IN {_slots(rows)}"
    found = {
        row: header_from(columns).summary(None if score is None else float(score))
        for row, score, *columns in connection.execute(query, rows)
    }
    return [found[row] for row in rows if row in found]


def read_nodes(connection: sqlite3.Connection, row: int, identity: str) -> tuple[Node, ...]:
    """The nodes of an episode, with what was marked later. Raises ``StorageError`` for damage."""
    try:
        return _nodes(_chunks(connection, [row])[row], _marks(connection, [row])[row])
    except StorageError as error:
        raise type(error)(f"trajectory {identity!r}: {error}") from error


def stored_outcome(connection: sqlite3.Connection, trajectory_id: str) -> Score | None:
    """The newest judgement of the outcome."""
    return newest_outcome(_scores(connection, [trajectory_id])[trajectory_id])


def load_scores(
    connection: sqlite3.Connection, ids: Sequence[str], lost: list[DamagedRecord] | None = None
) -> dict[str, tuple[Score, ...]]:
    """Id -> its scores, oldest first."""
    return {identity: tuple(scores) for identity, scores in _scores(connection, ids, lost).items()}


def has_labels(connection: sqlite3.Connection) -> bool:
    """Whether the store has the table of labels; one of an earlier release that may not be written has none."""
    return bool(connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'labels'").fetchone()[0])


def load_labels(connection: sqlite3.Connection, ids: Sequence[str], lost: list[DamagedRecord] | None) -> list[Label]:
    """The labels of these episodes, oldest first."""
    if not has_labels(connection):
        return []
    some = "trajectory_id IN (SELECT value FROM json_each(?))"
    query = f"SELECT row, trajectory_id, label FROM labels WHERE {some} ORDER BY row"
    found = connection.execute(query, (one_value(ids),))
    return [each for row, identity, document in found for each in _parsed(Label, row, identity, document, lost)]


def read_start(connection: sqlite3.Connection, row: int, identity: str) -> EpisodeStart:
    """What was known of an episode before it ran."""
    (document,) = connection.execute("SELECT start FROM documents WHERE episode = ?", (row,)).fetchone()
    return parsed_json(EpisodeStart, identity, document)


def header_from(columns: Sequence[object]) -> EpisodeHeader:
    """A header of the ``HEADER_COLUMNS``."""
    header = EpisodeHeader._make(columns)
    value: object = header.episode_return
    return header._replace(episode_return=None if value == NO_RETURN else float(str(value)))


def _chunks(connection: sqlite3.Connection, rows: Sequence[int]) -> dict[int, list[tuple[int, bytes]]]:
    chunks: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    query = f"SELECT episode, first, nodes FROM chunks WHERE episode IN {_slots(rows)} ORDER BY episode, first"
    for row, first, blob in connection.execute(query, rows):
        chunks[row].append((first, blob))
    return chunks


def _marks(connection: sqlite3.Connection, rows: Sequence[int]) -> dict[int, list[NodeMark]]:
    marks: dict[int, list[NodeMark]] = defaultdict(list)
    for row, mark in connection.execute(f"SELECT episode, mark FROM marks WHERE episode IN {_slots(rows)}", rows):
        marks[row].append(NodeMark.model_validate_json(mark))
    return marks


def _nodes(chunks: Sequence[tuple[int, bytes]], marks: Sequence[NodeMark]) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for first, blob in chunks:
        if first != len(nodes):
            raise DamagedError(f"nodes {len(nodes)} to {first} are missing; restore the file from a backup")
        nodes += unpack_nodes(blob)
    for mark in marks:
        mark_fresh(nodes[mark.index], mark)
    return tuple(nodes)


def _scores(
    connection: sqlite3.Connection, ids: Sequence[str], lost: list[DamagedRecord] | None = None
) -> dict[str, list[Score]]:
    scores: dict[str, list[Score]] = defaultdict(list)
    query = f"SELECT row, trajectory_id, score FROM scores WHERE trajectory_id IN {_slots(ids)} ORDER BY row"
    for row, identity, document in connection.execute(query, ids):
        for score in _parsed(Score, row, identity, document, lost):
            scores[identity].append(score)
    return scores


def _parsed[Record: (Score, Label)](
    kind: type[Record], row: int, identity: str, document: bytes, lost: list[DamagedRecord] | None
) -> Iterator[Record]:
    """The record, or nothing where it is damaged and ``lost`` takes its name."""
    try:
        yield parsed_json(kind, identity, document)
    except DamagedError as error:
        record = DamagedRecord(what=kind.__name__.lower(), id=identity, row=row, cause=str(error))
        if lost is None:
            raise DamagedError(record.in_words()) from error
        note_lost(lost, record)


def _trajectory(episode: _Episode, nodes: Sequence[Node]) -> Trajectory:
    if episode.start is None:
        raise DamagedError(f"the documents of trajectory {episode.id!r} are missing; restore the file from a backup")
    if len(nodes) != episode.nodes:
        raise DamagedError(
            f"trajectory {episode.id!r} has {len(nodes)} of {episode.nodes} nodes; restore the file from a backup"
        )
    start = parsed_json(EpisodeStart, episode.id, episode.start)
    if start.id != episode.id:
        raise DamagedError(f"trajectory {start.id!r} stands under {episode.id!r}; restore the file from a backup")
    if episode.end is None:
        return so_far(start, nodes, episode.head, episode.finished)
    return whole(start, nodes, parsed_end(start, episode.end))


def _slots(values: Sequence[object]) -> str:
    return f"({', '.join('?' * len(values))})"


@contextmanager
def one_state(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is read inside is of one moment."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


EMPTY = "e0.s0.l0.o"
"""The cursor before anything was stored."""

_MOST = 1000
_WATCHED = 256
_CURSOR = re.compile(r"e(\d{1,18})\.s(\d{1,18})\.l(\d{1,18})\.o((?:\d{1,18}:\d{1,18},)*)")


def store_changes(connection: sqlite3.Connection, cursor: str | None) -> StoreChanges:
    """What happened since. The numbers of rows only grow, and of unfinished episodes the cursor knows the revision."""
    with one_state(connection):
        if cursor is None:
            return StoreChanges(cursor=_now(connection))
        episodes, scores, labels, watched = _read_cursor(cursor)
        query = f"SELECT id, {UNFINISHED} FROM episodes WHERE row > ? ORDER BY row LIMIT {_MOST + 1}"
        new = connection.execute(query, (episodes,)).fetchall()
        query = f"SELECT row, id, {UNFINISHED}, revision FROM episodes WHERE row IN ({', '.join('?' * len(watched))})"
        known = connection.execute(query, list(watched)).fetchall()
        scored = _named(connection, "scores", scores)
        labelled = _named(connection, "labels", labels) if has_labels(connection) else []
        return StoreChanges(
            cursor=_now(connection),
            began=tuple(identity for identity, unfinished in new[:_MOST] if unfinished),
            grew=tuple(each for row, each, unfinished, revision in known if unfinished and revision != watched[row]),
            ended=(
                *(identity for _, identity, unfinished, _ in known if not unfinished),
                *(identity for identity, unfinished in new[:_MOST] if not unfinished),
            ),
            gone=len(watched) - len(known),
            scored=tuple(dict.fromkeys(scored[:_MOST])),
            labelled=tuple(dict.fromkeys(labelled[:_MOST])),
            more=max(len(new), len(scored), len(labelled)) > _MOST,
        )


def stored_revision(connection: sqlite3.Connection, trajectory_id: str | None) -> str:
    """A text that is another one when the episode, or anything in the store, has changed."""
    with one_state(connection):
        if trajectory_id is None:
            query = f"SELECT count(*), coalesce(sum(revision), 0) FROM episodes WHERE {UNFINISHED}"
            return f"{_last_rows(connection)} {connection.execute(query).fetchone()}"
        query = "SELECT row, revision FROM episodes WHERE id = ?"
        found = connection.execute(query, (trajectory_id,)).fetchone()
        said = [_newest_of(connection, table, trajectory_id) for table in ("scores", "labels")]
        return f"{found} {said}"


def _now(connection: sqlite3.Connection) -> str:
    query = f"SELECT row, revision FROM episodes WHERE {UNFINISHED} ORDER BY row DESC LIMIT {_WATCHED}"
    watched = connection.execute(query).fetchall()
    episodes, scores, labels = _last_rows(connection)
    return f"e{episodes}.s{scores}.l{labels}.o{''.join(f'{row}:{revision},' for row, revision in watched)}"


def _read_cursor(cursor: str) -> tuple[int, int, int, dict[int, int]]:
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise cursor_lost()
    pairs = (each.split(":") for each in found[4].split(",") if each)
    return int(found[1]), int(found[2]), int(found[3]), {int(row): int(revision) for row, revision in pairs}


def _last_rows(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """The numbers that were given last, also to what is gone."""
    found = dict(connection.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
    return found.get("episodes", 0), found.get("scores", 0), found.get("labels", 0)


def _named(connection: sqlite3.Connection, table: str, after: int) -> list[str]:
    query = f"SELECT trajectory_id FROM {table} WHERE row > ? ORDER BY row LIMIT {_MOST + 1}"
    return [identity for (identity,) in connection.execute(query, (after,))]


def _newest_of(connection: sqlite3.Connection, table: str, trajectory_id: str) -> Iterable[object]:
    if table == "labels" and not has_labels(connection):
        return None, 0
    query = f"SELECT max(row), count(*) FROM {table} WHERE trajectory_id = ?"
    return connection.execute(query, (trajectory_id,)).fetchone()
