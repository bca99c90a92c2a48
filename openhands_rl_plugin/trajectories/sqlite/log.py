"""The log of episodes in SQLite's tables. No call waits but for a transaction, so that one thread can run what works
with it."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Generator, Sequence
from types import coroutine
from typing import Any

from openhands_rl_plugin.core.records import SEARCHED, Label, NodeMark, TrajectoryFilter, TrajectoryOrder
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.trajectories.sqlite.database import FINISHED, KEYS, UNFINISHED
from openhands_rl_plugin.trajectories.storages.header import EpisodeHeader, conditions_of
from openhands_rl_plugin.trajectories.storages.log import WATCHED, Content, Episode, Judged, Kind, Log, Record

_FIELDS = EpisodeHeader._fields
_COLUMNS = ", ".join(_FIELDS)
_SOME = "IN (SELECT value FROM json_each(?))"
_INSERT = f"INSERT INTO episodes ({_COLUMNS}, head, scored, reward) VALUES ({'?, ' * len(_FIELDS)}?, 0, ?)"


class SqliteLog(Log):
    """As in ``Log``, inside of transactions that the caller opens and ends. Until one has ``begun``, a change waits at
    its first call of the log."""

    def __init__(self, connection: sqlite3.Connection, *, begun: bool = True) -> None:
        self.begun = begun
        self._run = connection.execute
        self._run_many = connection.executemany

    async def ids(self, where: TrajectoryFilter) -> Sequence[str]:
        condition, values = _condition_of(where)
        key, direction = KEYS[where.sort], "DESC" if where.descending else "ASC"
        # An index has finished episodes only: an open one changes with every turn, and is sorted when it is asked for.
        parts = {True: [FINISHED], False: [UNFINISHED], None: [FINISHED, UNFINISHED]}[where.finished]
        arms = [f"SELECT id, row, {key} FROM episodes WHERE {part} AND {condition}" for part in parts]
        # Downwards what is unknown comes last by itself.
        last = " NULLS LAST" if where.sort is TrajectoryOrder.REWARD and not where.descending else ""
        query = f"{' UNION ALL '.join(arms)} ORDER BY 3 {direction}{last}, 2 LIMIT ? OFFSET ?"
        limit = -1 if where.limit is None else where.limit
        return [each for each, _, _ in self._run(query, (*values * len(parts), limit, where.offset))]

    async def count(self, where: TrajectoryFilter) -> int:
        condition, values = _condition_of(where)
        part = {True: FINISHED, False: UNFINISHED, None: "TRUE"}[where.finished]
        return self._run(f"SELECT count(*) FROM episodes WHERE {part} AND {condition}", values).fetchone()[0]

    async def headers(self, ids: Sequence[str]) -> list[Episode]:
        await self._transaction()
        query = f"SELECT row, revision, score, {_COLUMNS} FROM episodes WHERE id {_SOME}"
        return [
            Episode(fields, row, revision, None if score is None else float(score))
            for row, revision, score, *fields in self._run(query, (_json(ids),))
        ]

    async def episodes(self, ids: Sequence[str], *, unseen: bool = False) -> list[Episode]:
        await self._transaction()
        query = (
            f"SELECT row, revision, head, documents.start, documents.end, {_COLUMNS} FROM episodes "
            f"LEFT JOIN documents ON episode = row WHERE id {_SOME}"
        )
        found = self._run(query, (_json(ids),)).fetchall()
        rows = json.dumps([row for row, *_ in found])
        packs, marks = defaultdict[int, list[bytes]](list), defaultdict[int, list[str]](list)
        query = f"SELECT episode, nodes FROM chunks WHERE episode {_SOME} ORDER BY episode, first"
        for row, pack in self._run(query, (rows,)):
            packs[row].append(pack)
        for row, mark in self._run(f"SELECT episode, mark FROM marks WHERE episode {_SOME}", (rows,)):
            marks[row].append(mark)
        episodes = list[Episode]()
        for row, revision, head, start, end, *fields in found:
            content = Content(start, packs[row], map(NodeMark.model_validate_json, marks[row]), head, end)
            episodes.append(Episode(fields, row, revision, content=content))
        return episodes

    async def write(self, before: Episode | None, header: EpisodeHeader, content: Content | None) -> Episode | None:
        await self._transaction()
        fields, reward = _fields_of(header), header.sorting_reward(None)
        if before is None:
            assert content is not None
            row, revision = self._run(_INSERT, (*fields, content.head, reward)).lastrowid or 0, 0
        elif content is None:
            return before
        else:
            row, revision = before.number, before.revision + 1
            changed = {name: new for name, new, old in zip(_FIELDS, fields, before.fields, strict=True) if new != old}
            query = (
                f"UPDATE episodes SET {''.join(f'{name} = ?, ' for name in changed)}head = ?, revision = ?, "
                f"reward = iif(scored AND NOT ?, reward, ?) WHERE row = ? AND revision = ? AND {UNFINISHED}"
            )
            failed = header.failure_kind is not None
            bound = (*changed.values(), content.head, revision, failed, reward, row, before.revision)
            if self._run(query, bound).rowcount == 0:
                return None
        if content.start is not None:
            self._empty(row)
            self._run("INSERT INTO documents VALUES (?, ?, ?)", (row, content.start, content.end))
        elif content.end is not None:
            self._run("UPDATE documents SET end = ? WHERE episode = ?", (content.end, row))
        first = 0 if before is None or content.start is not None else before.header.nodes
        chunks = [(row, first, header.nodes - first, pack) for pack in content.packs]
        self._run_many("INSERT INTO chunks VALUES (?, ?, ?, ?)", chunks)
        marks = [(row, mark.index, mark.model_dump_json(exclude_defaults=True)) for mark in content.marks]
        self._run_many("INSERT OR REPLACE INTO marks VALUES (?, ?, ?)", marks)
        return Episode(fields, row, revision)

    async def correct(self, episode: Episode, header: EpisodeHeader) -> None:
        changes = ", ".join(f"{name} = ?" for name in _FIELDS)
        query = f"UPDATE episodes SET {changes}, scored = 0, score = NULL, reward = ? WHERE row = ?"
        self._run(query, (*_fields_of(header), header.sorting_reward(None), episode.number))

    async def drop(self, episode: Episode) -> bool:
        self._empty(episode.number)
        for table, key in (("episodes", "id"), ("scores", "trajectory_id"), ("labels", "trajectory_id")):
            self._run(f"DELETE FROM {table} WHERE {key} = ?", (episode.fields[0],))
        return True

    async def add(self, values: Sequence[Score] | Sequence[Label], packed: Sequence[bytes]) -> None:
        await self._transaction()
        for value, document in zip(values, packed, strict=True):
            if isinstance(value, Score):
                query = "INSERT INTO scores (trajectory_id, score) VALUES (?, ?)"
                self._run(query, (value.trajectory_id, document))
            else:
                query = "INSERT OR IGNORE INTO labels (id, trajectory_id, label) VALUES (?, ?, ?)"
                self._run(query, (value.id, value.trajectory_id, document))

    async def records(self, kind: Kind, ids: Sequence[str]) -> list[Record]:
        query = f"SELECT row, trajectory_id, {kind[:-1]} FROM {kind} WHERE trajectory_id {_SOME} ORDER BY row"
        return self._run(query, (_json(ids),)).fetchall()

    async def judge(self, judged: Sequence[Judged]) -> None:
        for episode, _, newest in judged:
            values = newest is not None, newest and newest.reward, episode.header.sorting_reward(newest)
            query = "UPDATE episodes SET scored = ?, score = ?, reward = ? WHERE row = ?"
            self._run(query, (*values, episode.number))

    async def state(self) -> str:
        changed = f"SELECT row, revision FROM episodes WHERE {UNFINISHED} ORDER BY row DESC LIMIT {WATCHED}"
        return str([self._run(query).fetchall() for query in ("SELECT name, seq FROM sqlite_sequence", changed)])

    @coroutine
    def _transaction(self) -> Generator[None]:
        if not self.begun:
            yield

    def _empty(self, row: int) -> None:
        for table in ("documents", "chunks", "marks"):
            self._run(f"DELETE FROM {table} WHERE episode = ?", (row,))


def _condition_of(where: TrajectoryFilter) -> tuple[str, list[Any]]:
    compared = list(conditions_of(where))
    terms = [f"{name} {sign} ?" for name, sign, _ in compared]
    values = [value for *_, value in compared]
    if where.failed is not None:
        terms.append(f"failure_kind IS {'NOT ' if where.failed else ''}NULL")
    if where.ids is not None:
        terms.append(f"id {_SOME}")
        values.append(_json(where.ids))
    if where.contains is not None:
        terms.append(f"({' OR '.join(f'instr({name}, ?)' for name in SEARCHED)})")
        values += [where.contains] * len(SEARCHED)
    return " AND ".join(terms) or "TRUE", values


def _json(ids: Sequence[str]) -> str:
    """A query may have only so many values. In JSON a NUL ends a text, and no id has one."""
    return json.dumps([each for each in ids if "\0" not in each])


def _fields_of(header: EpisodeHeader) -> tuple[Any, ...]:
    """NULL is not allowed for a return."""
    return header if header.episode_return is not None else header._replace(episode_return="none")  # type: ignore[arg-type]
