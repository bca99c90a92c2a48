"""What has changed in a store, without reading any node."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable

from openhands_rl_plugin.core.records import StoreChanges
from openhands_rl_plugin.trajectories.sqlite.conditions import UNFINISHED
from openhands_rl_plugin.trajectories.sqlite.reading import has_labels, one_state
from openhands_rl_plugin.trajectories.storages.documents import cursor_lost

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
