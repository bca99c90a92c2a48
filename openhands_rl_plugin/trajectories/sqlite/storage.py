"""Trajectories and scores in one SQLite file: no server, nothing to set up."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import batched
from pathlib import Path
from types import TracebackType
from typing import Self

from openhands_rl_plugin.core.errors import DamagedError, StorageError, describe
from openhands_rl_plugin.core.records import (
    DamagedRecord,
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
    StoreChanges,
    TrajectoryFilter,
    TrajectorySummary,
)
from openhands_rl_plugin.core.redaction import secrets_looked_up_once
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.trajectories.sqlite.database import FILE_NAME, connect, explained, make_database, torn
from openhands_rl_plugin.trajectories.sqlite.group_commit import GroupCommitter, WriteCall
from openhands_rl_plugin.trajectories.sqlite.reading import (
    EMPTY,
    Found,
    count,
    damage,
    load,
    load_labels,
    load_scores,
    load_summaries,
    row_numbers,
    store_changes,
    stored_revision,
)
from openhands_rl_plugin.trajectories.sqlite.writing import (
    SqliteEpisodeWriter,
    packed_growth,
    packed_labels,
    packed_scores,
    packed_start,
    packed_trajectory,
)
from openhands_rl_plugin.trajectories.storages.guard import SecretGuard
from openhands_rl_plugin.trajectories.storages.packing import note_lost

# A reader holds so many trajectories, or summaries, in one batch, and one more batch is read ahead.
_BATCH = 8
_SUMMARIES = 256

_Call = WriteCall[SqliteEpisodeWriter]


class FileTrajectoryStorage:
    """``trajectories.sqlite`` in the folder ``path``, which several processes of one machine may share.

    A call that writes returns when the record is on the disk; calls that wait at the same time share one transaction
    and one flush. An acknowledged record survives ``kill -9`` and a loss of power, and half a record is never read.
    With ``durable=False`` nothing is flushed before a call returns: that survives ``kill -9`` too, but a loss of power
    or a crash of the system loses the last calls (up to about the last thousand pages, all of them from the end).
    """

    def __init__(self, path: str | Path, durable: bool = True) -> None:
        self._folder = Path(path).expanduser()
        self._file = self._folder / FILE_NAME
        self._durable = durable
        self._process = os.getpid()
        self._guard = SecretGuard()
        self._committer = GroupCommitter[SqliteEpisodeWriter](self._store, secrets_looked_up_once)
        self._readers: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._writer: tuple[sqlite3.Connection, SqliteEpisodeWriter] | None = None
        self._lost: list[DamagedRecord] | None = None

    async def add(self, trajectory: Trajectory) -> None:
        """Store a finished episode; one that is finished already stays as it is. Raises ``StorageError``."""
        await self._write(lambda: packed_trajectory(self._guard.trajectory(trajectory)), SqliteEpisodeWriter.add)

    async def begin(self, start: EpisodeStart) -> None:
        """Open an episode; one whose id is known stays as it is. Raises ``StorageError``."""
        await self._write(lambda: packed_start(self._guard.start(start)), SqliteEpisodeWriter.begin)

    async def grow(self, growth: EpisodeGrowth) -> None:
        """Append to an open episode; the head and the marks of the last call hold. Raises ``StorageError``."""
        await self._write(lambda: packed_growth(self._guarded(growth)), SqliteEpisodeWriter.grow)

    async def end(self, end: EpisodeEnd) -> None:
        """Close an open episode; a finished one stays as it is. Raises ``StorageError``."""
        await self._write(lambda: self._guard.end(end), SqliteEpisodeWriter.end)

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """Forget unfinished episodes with their scores and return how many. Raises ``StorageError``."""
        if not trajectory_ids:
            return 0
        return await self._write(lambda: self._guard.drop(trajectory_ids), SqliteEpisodeWriter.drop)

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """Append judgements, all or none of them. Raises ``StorageError``."""
        if scores:
            await self._write(lambda: packed_scores(self._guard.scores(scores)), SqliteEpisodeWriter.add_scores)

    async def add_labels(self, labels: Sequence[Label]) -> None:
        """Append labels, all or none of them; one whose id is known stays as it is. Raises ``StorageError``."""
        if labels:
            await self._write(lambda: packed_labels(self._guard.labels(labels)), SqliteEpisodeWriter.add_labels)

    async def labels(self, trajectory_ids: Sequence[str]) -> tuple[Label, ...]:
        """The labels of these episodes, oldest first. Raises ``StorageError``."""
        return tuple(await self._read(lambda connection: load_labels(connection, trajectory_ids, self._lost), []))

    async def scores(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[Score, ...]]:
        """As in ``ReadsScores``. Raises ``StorageError``."""
        return await self._read(lambda connection: load_scores(connection, [*trajectory_ids], self._lost), {})

    async def get(self, trajectory_id: str) -> Found | None:
        """One trajectory, finished or not, with its scores, oldest first, or ``None``. Raises ``StorageError``."""
        return await anext(self.find(TrajectoryFilter(ids=(trajectory_id,), finished=None)), None)

    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        """Stream the matches with their scores (oldest first). By default in the order in which it was begun or added.

        A few records are held at a time. What is added while the stream is read is not part of it; an unfinished
        episode is read as it stands when the stream comes to it. Raises ``StorageError``, also for a damaged record.
        """

        def whole(connection: sqlite3.Connection, rows: Sequence[int]) -> list[Found]:
            return load(connection, rows, self._lost)

        async for batch in self._stream(where, whole, _BATCH):
            for found in batch:
                yield found

    async def summaries(self, where: TrajectoryFilter | None = None) -> AsyncIterator[TrajectorySummary]:
        """Like ``find``, without reading any node. Raises ``StorageError``."""
        async for batch in self._stream(where, load_summaries, _SUMMARIES):
            for summary in batch:
                yield summary

    async def count(self, where: TrajectoryFilter | None = None) -> int:
        """How many match, ``offset`` and ``limit`` aside. Raises ``StorageError``."""
        return await self._read(lambda connection: count(connection, where or TrajectoryFilter()), 0)

    async def changed_since(self, cursor: str | None) -> StoreChanges:
        """As in ``TellsChanges``. Raises ``StorageError``."""
        return await self._read(
            lambda connection: store_changes(connection, cursor), StoreChanges(cursor=cursor or EMPTY)
        )

    async def revision(self, trajectory_id: str | None = None) -> str:
        """As in ``TellsChanges``. Raises ``StorageError``."""
        return await self._read(lambda connection: stored_revision(connection, trajectory_id), "")

    def skip_damaged(self) -> list[DamagedRecord]:
        """As in ``SkipsDamage``."""
        self._lost = self._lost or []
        return self._lost

    async def check(self) -> None:
        """Raises ``StorageError`` when what lists the episodes is damaged, so that some may not be found."""
        if (cause := await self._read(damage, None)) is not None:
            raise StorageError(torn(self._file, cause))

    async def close(self) -> None:
        """Flush and release. The storage can be used again; it then opens its file again."""
        await self._committer.close()
        await asyncio.to_thread(self._release)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _stream[Item](
        self,
        where: TrajectoryFilter | None,
        load: Callable[[sqlite3.Connection, Sequence[int]], list[Item]],
        size: int,
    ) -> AsyncIterator[list[Item]]:
        """Batches in order; the next one is read while one is used."""
        rows = await self._read(lambda connection: row_numbers(connection, where or TrajectoryFilter()), ())
        ahead: asyncio.Task[list[Item]] | None = None
        try:
            for batch in batched(rows, size):
                ready = [] if ahead is None else await ahead
                # One at a time: two threads that make objects only wait for each other.
                ahead = asyncio.create_task(self._read(self._readable(load, batch), []))
                yield ready
            if ahead is not None:
                yield await ahead
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    def _readable[Item](
        self, load: Callable[[sqlite3.Connection, Sequence[int]], list[Item]], rows: Sequence[int]
    ) -> Callable[[sqlite3.Connection], list[Item]]:
        """``load`` of ``rows``, one by one where something is damaged: that is named, and left out if it is skipped."""

        def ask(connection: sqlite3.Connection) -> list[Item]:
            try:
                return _asked(lambda connection: load(connection, rows), connection)
            except DamagedError as error:
                if len(rows) > 1:
                    return [item for row in rows for item in self._readable(load, (row,))(connection)]
                found = connection.execute("SELECT id FROM episodes WHERE row = ?", rows).fetchone()
                record = DamagedRecord(what="episode", id=found and found[0], row=rows[0], cause=str(error))
                if self._lost is None:
                    raise DamagedError(record.in_words()) from error
                note_lost(self._lost, record)
                return []

        return ask

    async def _read[Answer](self, ask: Callable[[sqlite3.Connection], Answer], nothing: Answer) -> Answer:
        """``ask`` in a thread, or ``nothing`` when there is no store yet."""
        self._check_process()
        return await asyncio.to_thread(self._ask, ask, nothing)

    def _ask[Answer](self, ask: Callable[[sqlite3.Connection], Answer], nothing: Answer) -> Answer:
        if not self._file.exists():
            return nothing
        with explained(self._file):
            with self._lock:
                readers = self._readers
                connection = readers.pop() if readers else None
            if connection is None:
                connection = connect(self._file)
                connection.execute("PRAGMA query_only = ON")
            try:
                answer = _asked(ask, connection)
            except BaseException:
                connection.close()
                raise
        with self._lock:
            # On a disk that is not written from here the next reader looks again whether somebody else does.
            if still_open := readers is self._readers and os.access(self._folder, os.W_OK):
                readers.append(connection)
        if not still_open:
            connection.close()
        return answer

    async def _write[Packed, Answer](
        self, pack: Callable[[], Packed], store: Callable[[SqliteEpisodeWriter, Packed], Answer]
    ) -> Answer:
        """Both are called in the committer's thread, so that the event loop is not blocked."""
        self._check_process()
        return await self._committer.call(pack, store)

    def _guarded(self, growth: EpisodeGrowth) -> EpisodeGrowth:
        """An episode of another process is on the disk, because its nodes were acknowledged."""
        if not self._guard.knows(growth):
            where = TrajectoryFilter(ids=(growth.trajectory_id,), finished=None)
            for trajectory, _ in self._ask(lambda connection: load(connection, row_numbers(connection, where)), []):
                self._guard.recall(trajectory)
        return self._guard.growth(growth)

    def _store(self, waiting: Sequence[_Call]) -> None:
        """Called by one thread at a time."""
        try:
            with explained(self._file):
                connection, writer = self._opened()
                connection.execute("BEGIN IMMEDIATE")
                for item in waiting:
                    if item.error is None:
                        _apply(connection, writer, item)
                connection.execute("COMMIT")
        except StorageError as error:
            self._undo(waiting, error)
        except BaseException as error:
            self._undo(waiting, error)
            raise

    def _undo(self, waiting: Sequence[_Call], error: BaseException) -> None:
        # Closing the connection undoes what was written; the next call opens a new one.
        self._disconnect()
        for item in waiting:
            item.error = item.error or error

    def _opened(self) -> tuple[sqlite3.Connection, SqliteEpisodeWriter]:
        if self._writer is None:
            if not self._file.exists():
                make_database(self._folder)
            connection = connect(self._file, durable=self._durable)
            self._writer = connection, SqliteEpisodeWriter(connection)
        elif not self._file.exists():
            raise StorageError(f"{self._file} was deleted while it was in use; what was stored in it is gone")
        return self._writer

    def _release(self) -> None:
        with self._committer.alone():
            self._disconnect()

    def _disconnect(self) -> None:
        with self._lock:
            readers, self._readers = self._readers, []
        writer, self._writer = self._writer, None
        for connection in (*readers, *(writer[:1] if writer else ())):
            connection.close()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StorageError("a storage cannot be carried over a fork; open it in the process that uses it")


def _asked[Answer](ask: Callable[[sqlite3.Connection], Answer], connection: sqlite3.Connection) -> Answer:
    try:
        return ask(connection)
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise DamagedError(f"a record is damaged, restore the file from a backup: {describe(error)}") from error


def _apply(connection: sqlite3.Connection, writer: SqliteEpisodeWriter, item: _Call) -> None:
    """Run one call; its error leaves the others of the transaction alone."""
    connection.execute("SAVEPOINT call")
    try:
        item.answer = item.store(writer, item.packed)
    except (StorageError, OverflowError, UnicodeEncodeError, sqlite3.DataError) as error:
        connection.execute("ROLLBACK TO call")
        item.error = error if isinstance(error, StorageError) else StorageError(f"not stored: {describe(error)}")
    connection.execute("RELEASE call")
