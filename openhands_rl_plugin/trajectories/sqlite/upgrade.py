"""What a store lacks that an earlier release made: the table of labels, rewards by the newest judgement, and
turns and returns of all segments, indices of orders."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from itertools import groupby

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.records import EpisodeEnd
from openhands_rl_plugin.core.types import Score, pays_rewards
from openhands_rl_plugin.trajectories.sqlite.conditions import FINISHED, NO_RETURN
from openhands_rl_plugin.trajectories.sqlite.ordering import INDICES
from openhands_rl_plugin.trajectories.sqlite.reading import has_labels, read_nodes
from openhands_rl_plugin.trajectories.storages.documents import parsed_json
from openhands_rl_plugin.trajectories.storages.header import Spine

LABELS = """
CREATE TABLE labels (
    row INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, trajectory_id TEXT NOT NULL, label BLOB NOT NULL
);
CREATE INDEX labels_trajectory ON labels (trajectory_id);
"""

JUDGE = (
    "UPDATE episodes SET scored = ?1, score = ?2, reward = CASE WHEN failure_kind IS NOT NULL THEN NULL "
    "WHEN ?1 THEN ?3 WHEN typeof(episode_return) IN ('real', 'integer') THEN episode_return END WHERE id = ?4"
)
"""Parameters: whether there is a judgement, what it says as a column, as a number, and the episode's id."""
_COUNT = (
    "UPDATE episodes SET turns = ?1, episode_return = CASE WHEN failure_kind IS NULL THEN ?2 ELSE episode_return END, "
    "reward = CASE WHEN failure_kind IS NULL AND NOT scored THEN ?3 ELSE reward END WHERE row = ?4"
)


def upgrade(connection: sqlite3.Connection) -> None:
    """Bring an older store up to date, once. One that may only be read stays as it is."""
    if has_labels(connection) and _has_indices(connection):
        return
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname.startswith("SQLITE_READONLY"):
            return
        raise
    try:
        if not has_labels(connection):
            for statement in LABELS.split(";"):
                connection.execute(statement)
            _judge_again(connection)
            _count_all_segments(connection)
            _forget_unpaid_returns(connection)
        if not _has_indices(connection):
            for statement in INDICES.split(";"):
                connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _has_indices(connection: sqlite3.Connection) -> bool:
    known = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    return {"episodes_by_reward", "episodes_by_tokens"} <= known


def judged_columns(newest: Score | None) -> tuple[bool, float | str | None, float | None]:
    """The first parameters of ``JUDGE``."""
    reward = None if newest is None else newest.reward
    # SQLite makes NULL of a NaN, and keeps text in a column that has no type.
    return newest is not None, "nan" if reward is not None and reward != reward else reward, reward


def _judge_again(connection: sqlite3.Connection) -> None:
    """Earlier releases took the newest score of any version, opinions too."""
    query = "SELECT trajectory_id, score FROM scores ORDER BY trajectory_id, row"
    for identity, rows in groupby(connection.execute(query), key=lambda row: row[0]):
        documents = [document for _, document in rows]
        # One that is damaged is told when its episode is read.
        with suppress(StorageError):
            scores = [parsed_json(Score, identity, document) for document in documents]
            connection.execute(JUDGE, (*judged_columns(newest_outcome(scores)), identity))


def _count_all_segments(connection: sqlite3.Connection) -> None:
    """Earlier releases counted the turns and rewards of a condensed episode's last segment only: more steps were
    executed than that has turns."""
    query = f"SELECT row, id, head FROM episodes WHERE steps > turns AND {FINISHED}"
    for row, identity, head in connection.execute(query).fetchall():
        with suppress(StorageError):
            turns, total = Spine(read_nodes(connection, row, identity)).along(head)
            column = NO_RETURN if total is None else "nan" if total != total else total
            connection.execute(_COUNT, (turns, column, total, row))


def _forget_unpaid_returns(connection: sqlite3.Connection) -> None:
    """Where the environment pays nothing, a return of 0 said only that steps were executed."""
    query = "SELECT row, id, environment FROM episodes WHERE NOT scored AND failure_kind IS NULL AND episode_return = 0"
    for row, identity, environment in connection.execute(query).fetchall():
        with suppress(StorageError):
            found = connection.execute("SELECT end FROM documents WHERE episode = ?", (row,)).fetchone()
            evidence = parsed_json(EpisodeEnd, identity, found[0]).evidence if found and found[0] else {}
            if not pays_rewards(environment, evidence):
                connection.execute("UPDATE episodes SET episode_return = 'none', reward = NULL WHERE row = ?", (row,))
