"""Trajectories and scores in one SQLite file: no server, nothing to set up."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from openhands_rl_plugin.core.errors import DamagedError, StorageError, describe
from openhands_rl_plugin.core.redaction import secrets_looked_up_once
from openhands_rl_plugin.trajectories.sqlite.database import (
    FILE_NAME,
    NEWEST_INDEX,
    connect,
    empty_database,
    explained,
    make_database,
    make_tables,
    torn,
)
from openhands_rl_plugin.trajectories.sqlite.log import SqliteLog
from openhands_rl_plugin.trajectories.storages.log import Log, LogStorage, upgrade

type Work[Answer] = Callable[[Log], Coroutine[Any, Any, Answer]]


@dataclass(eq=False)
class _Call:
    """A change on its way to the disk: ``running`` once it has started, ``done`` with an answer or an error."""

    identity: str
    work: Work[Any]
    outcome: asyncio.Future[Any]
    running: Coroutine[Any, Any, Any] | None = None
    done: bool = False
    answer: Any = None
    error: StorageError | None = None


class FileTrajectoryStorage(LogStorage):
    """``trajectories.sqlite`` in the folder ``path``, which several processes of one machine may share.

    A call that writes returns when the record is on the disk; calls that wait at the same time share one transaction
    and one flush. An acknowledged record survives ``kill -9`` and a loss of power, and half a record is never read.
    With ``durable=False`` nothing is flushed before a call returns: that survives ``kill -9`` too, but a loss of power
    or a crash of the system loses the last calls (up to about the last thousand pages, all of them from the end).
    """

    def __init__(self, path: str | Path, durable: bool = True) -> None:
        super().__init__()
        self._folder = Path(path).expanduser()
        self._file = self._folder / FILE_NAME
        self._durable = durable
        self._process = os.getpid()
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._waiting = deque[_Call]()
        self._called = False  # whether the thread has been notified of waiting calls
        self._thread = _writing_thread()
        # Two threads that read only wait for each other: both make objects.
        self._reading, self._settling = threading.Lock(), threading.Lock()

    async def check(self) -> None:
        """Raises ``StorageError`` when what lists the episodes is damaged, so that some may not be found.

        SQLite may leave out rows of a damaged page without a word. Reads these tables once, and no nodes.
        """

        def checked(connection: sqlite3.Connection) -> None:
            for table in ("episodes", "marks"):
                (found,) = connection.execute(f"PRAGMA integrity_check({table})").fetchone()
                if found != "ok":
                    raise StorageError(torn(self._file, f"in the table {table}: {found.splitlines()[0]}"))

        await asyncio.to_thread(self._ask, checked)

    async def close(self) -> None:
        """Flush and release. The storage can be used again; it then opens its file again."""
        self._wake()
        thread, self._thread = self._thread, _writing_thread()
        await asyncio.to_thread(thread.shutdown)
        await asyncio.to_thread(self._release)

    async def _read[Answer](self, work: Work[Answer]) -> Answer:
        """``work`` in a thread; all that it reads is of one moment."""
        return await asyncio.to_thread(self._ask, lambda connection: _driven(work, connection))

    async def _change[Answer](self, identity: str, work: Work[Answer]) -> Answer:
        """``work`` in the one thread that writes: with a second one, to pack while another flushes, both waited for
        Python's lock longer than the flush takes."""
        self._check_process()
        loop = asyncio.get_running_loop()
        call = _Call(identity, work, loop.create_future())
        self._waiting.append(call)
        # A moment later, so that all who call now are stored together.
        loop.call_soon(self._wake)
        return await call.outcome

    def _ask[Answer](self, ask: Callable[[sqlite3.Connection], Answer]) -> Answer:
        self._check_process()
        with explained(self._file), self._reading:
            there, kept = self._file.exists(), False
            connection = (self._reader or self._connect()) if there else empty_database()
            try:
                connection.execute("PRAGMA query_only = ON")
                connection.execute("BEGIN")
                answer = ask(connection)
                connection.execute("ROLLBACK")
                # On a disk that is not written from here the next reader looks again whether somebody else does.
                kept = there and os.access(self._folder, os.W_OK)
                return answer
            except (ValueError, LookupError, TypeError, OverflowError) as error:
                raise DamagedError(f"a record is damaged, restore the file from a backup: {describe(error)}") from error
            finally:
                self._reader = connection if kept else None
                if not kept:
                    connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self._file, durable=self._durable)
        try:
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            if not {"labels", NEWEST_INDEX} <= names:
                _upgrade(connection, again="labels" not in names)
        except BaseException:
            connection.close()
            raise
        return connection

    def _wake(self) -> None:
        """Have the thread store the waiting calls, unless it has been notified already."""
        if self._called or not self._waiting:
            return
        self._called = True
        try:
            self._thread.submit(self._settle)
        except RuntimeError:
            # No threads are to be had once the interpreter shuts down, which is when a last episode may be saved.
            self._settle()

    def _settle(self) -> None:
        """Store the waiting calls in one transaction, and wake their callers.

        What a call computes before it needs the log comes first, so that other processes wait for the writing only.
        """
        with self._settling:
            self._called = False
            group = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if not group:
                return
            try:
                with explained(self._file), secrets_looked_up_once():
                    connection = self._opened()
                    log = SqliteLog(connection, begun=False)
                    # A second call of an episode goes on from what the first one wrote.
                    for call in {call.identity: call for call in reversed(group)}.values():
                        _go_on(call, log)
                    connection.execute("BEGIN IMMEDIATE")
                    log.begun = True
                    for call in (each for each in group if not each.done):
                        # Its error leaves the others of the transaction alone.
                        connection.execute("SAVEPOINT call")
                        _go_on(call, log)
                        if call.error is not None:
                            connection.execute("ROLLBACK TO call")
                        connection.execute("RELEASE call")
                    connection.execute("COMMIT")
            except BaseException as error:
                # Closing the connection undoes what was written; the next call opens a new one.
                self._disconnect()
                failed = error if isinstance(error, StorageError) else StorageError(describe(error))
                for call in group:
                    call.error = call.error or failed
                raise
            finally:
                for loop, calls in groupby(group, lambda call: call.outcome.get_loop()):
                    # No caller waits in a closed loop.
                    with suppress(RuntimeError):
                        loop.call_soon_threadsafe(_wake_callers, tuple(calls))

    def _opened(self) -> sqlite3.Connection:
        if self._writer is None:
            if not self._file.exists():
                make_database(self._folder)
            self._writer = self._connect()
        elif not self._file.exists():
            raise StorageError(f"{self._file} was deleted while it was in use; what was stored in it is gone")
        return self._writer

    def _release(self) -> None:
        with self._settling, self._reading:
            self._disconnect()
            if self._reader is not None:
                self._reader.close()
            self._reader = None

    def _disconnect(self) -> None:
        self._open.clear()
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StorageError("a storage cannot be carried over a fork; open it in the process that uses it")


def _writing_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectory-storage")


def _driven[Answer](work: Work[Answer], connection: sqlite3.Connection) -> Answer:
    """The answer of a coroutine that never waits."""
    running = work(SqliteLog(connection))
    try:
        running.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a log in SQLite does not wait")


def _upgrade(connection: sqlite3.Connection, *, again: bool) -> None:
    """Make what is lacking. ``again``: count and judge the episodes again."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if not error.sqlite_errorname.startswith("SQLITE_READONLY"):
            raise
        if again:
            connection.execute("CREATE TEMP TABLE labels (row INTEGER, trajectory_id TEXT, label BLOB)")
        return
    make_tables(connection)
    if again:
        _driven(upgrade, connection)
    connection.execute("COMMIT")


def _go_on(call: _Call, log: SqliteLog) -> None:
    """Run a call up to its end, or to where it needs a transaction that has not begun."""
    call.running = call.running or call.work(log)
    try:
        call.running.send(None)
    except StopIteration as ended:
        call.answer, call.done = ended.value, True
    except (StorageError, OverflowError, ValueError, sqlite3.DataError, sqlite3.IntegrityError) as error:
        call.error = error if isinstance(error, StorageError) else StorageError(f"not stored: {describe(error)}")
        call.done = True


def _wake_callers(calls: Sequence[_Call]) -> None:
    for call in calls:
        if call.outcome.done():
            continue  # no caller waits any more, but it is stored
        if call.error is None:
            call.outcome.set_result(call.answer)
        else:
            call.outcome.set_exception(call.error)
