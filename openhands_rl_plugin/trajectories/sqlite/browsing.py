"""Counts over many episodes, and what has changed, without reading any node."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence

from openhands_rl_plugin.core.browsing.listing import FacetCount, PolicyTokens, RewardHistogram, StoreChanges
from openhands_rl_plugin.core.browsing.terms import Column
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.trajectories.sqlite.conditions import COLUMNS, FINISHED, UNFINISHED, condition_of
from openhands_rl_plugin.trajectories.sqlite.reading import has_labels, one_state
from openhands_rl_plugin.trajectories.storages.documents import cursor_lost

EMPTY = "e0.s0.l0.o"
"""The cursor before anything was stored."""

_MOST = 1000
_WATCHED = 256
_CURSOR = re.compile(r"e(\d{1,18})\.s(\d{1,18})\.l(\d{1,18})\.o((?:\d{1,18}:\d{1,18},)*)")


def facet_counts(
    connection: sqlite3.Connection, where: TrajectoryFilter, by: Sequence[Column], most: int
) -> list[tuple[FacetCount, ...]]:
    """For each column the most frequent values of the matches."""
    condition, values = condition_of(where)
    with one_state(connection):
        return [_facet(connection, condition, values, column, most) for column in by]


def reward_histogram(connection: sqlite3.Connection, where: TrajectoryFilter, bins: int) -> RewardHistogram:
    """How the rewards of the matches are distributed."""
    condition, values = condition_of(where)
    with one_state(connection):
        query = f"SELECT min(reward), max(reward), count(*) - count(reward) FROM episodes WHERE {condition}"
        low, high, unknown = _ends(connection) if condition == "TRUE" else connection.execute(query, values).fetchone()
        if low is None or high is None:
            return RewardHistogram(unknown=unknown)
        width = (high - low) / bins or 1.0
        found: Counter[int] = Counter()
        # An index has the rewards of those that have ended, and another one names the others.
        for part in (FINISHED, UNFINISHED):
            query = (
                f"SELECT min(cast((reward - ?) / ? AS INTEGER), ?), count(*) FROM episodes WHERE {condition} "
                f"AND {part} AND reward IS NOT NULL GROUP BY 1"
            )
            found.update(dict(connection.execute(query, (low, width, bins - 1, *values)).fetchall()))
    counts = tuple(found[at] for at in range(bins))
    return RewardHistogram(low=low, high=high, counts=counts, unknown=unknown)


def policy_tokens(connection: sqlite3.Connection, where: TrajectoryFilter) -> tuple[PolicyTokens, ...]:
    """What the episodes of each policy took."""
    condition, values = condition_of(where)
    query = (
        "SELECT base_model, adapter, policy_version, count(*), sum(prompt_tokens), sum(completion_tokens) "
        f"FROM episodes WHERE {condition} GROUP BY base_model, adapter, policy_version"
    )
    return tuple(
        PolicyTokens(
            policy=PolicyRef(base_model=model, adapter=adapter, version=version),
            episodes=episodes,
            prompt_tokens=prompt,
            completion_tokens=completion,
        )
        for model, adapter, version, episodes, prompt, completion in connection.execute(query, values)
    )


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


def _ends(connection: sqlite3.Connection) -> tuple[float | None, float | None, int]:
    """Least and greatest reward of all, and how many have none, each from an index."""
    # Only with its condition is the last one read from the index of rewards.
    asked = ("min(reward)", "max(reward)", "count(*)")
    queries = [f"SELECT {each} FROM episodes WHERE {FINISHED} AND reward IS NOT NULL" for each in asked]
    low, high, known = (connection.execute(query).fetchone()[0] for query in queries)
    query = f"SELECT min(reward), max(reward), count(reward) FROM episodes WHERE {UNFINISHED}"
    others = connection.execute(query).fetchone()
    (total,) = connection.execute("SELECT count(*) FROM episodes").fetchone()
    lows, highs = ([each for each in pair if each is not None] for pair in ((low, others[0]), (high, others[1])))
    return min(lows, default=None), max(highs, default=None), total - known - others[2]


def _facet(
    connection: sqlite3.Connection, condition: str, values: list[object], column: Column, most: int
) -> tuple[FacetCount, ...]:
    shown = COLUMNS[column]
    if column is Column.ADAPTER:
        # Grouped by both, as their index is.
        query = (
            "SELECT adapter || coalesce('@' || policy_version, ''), count(*) AS many FROM episodes "
            f"WHERE {condition} GROUP BY adapter, policy_version ORDER BY many DESC, adapter, policy_version LIMIT ?"
        )
    else:
        # Hardly any failed: those have an index, and the others are the rest.
        known = " AND failure_kind IS NOT NULL" if column is Column.FAILED else ""
        query = (
            f"SELECT {shown}, count(*) AS many FROM episodes WHERE {condition}{known} GROUP BY {shown} "
            "ORDER BY many DESC, 1 LIMIT ?"
        )
    found = connection.execute(query, (*values, most))
    counts = [FacetCount(value=None if value is None else str(value), count=count) for value, count in found]
    if column is Column.FAILED:
        query = f"SELECT count(*) FROM episodes WHERE {condition}"
        rest = connection.execute(query, values).fetchone()[0] - sum(each.count for each in counts)
        counts += [FacetCount(value=None, count=rest)] if rest else []
        counts = sorted(counts, key=lambda each: -each.count)[:most]
    return tuple(counts)


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
