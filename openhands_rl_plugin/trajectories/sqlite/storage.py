"""Trajectories and scores in one SQLite file: no server, nothing to set up. The file's tables:

- ``episodes``: one row for each, with the columns of a summary, where the episode stands, and its reward;
- ``documents``: what is known at the start and at the end of an episode, as packed JSON;
- ``chunks``: the nodes, packed as they came, and of an episode that has ended packed once more as a whole;
- ``marks``: what became known of a node of an open episode later, as JSON;
- ``scores``: the judgements, as packed JSON, in the order in which they came; ``labels``: the same of labels;
- ``names``: the labels by which an episode is found.

A store of an earlier release gets the tables and indices that it lacks when it is opened, and is counted again.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from openhands_rl_plugin.core.errors import DamagedError, StorageError, describe
from openhands_rl_plugin.core.files import PRIVATE, locked_folder, replacing, sync
from openhands_rl_plugin.core.records import SEARCHED, NodeMark, TrajectoryFilter, TrajectoryOrder, TrajectorySummary
from openhands_rl_plugin.core.redaction import secrets_looked_up_once
from openhands_rl_plugin.core.types import SCHEMA_VERSION, Score, StopReason
from openhands_rl_plugin.trajectories.storages.log import (
    COLUMNS,
    WATCHED,
    Content,
    Episode,
    Judged,
    Kind,
    Log,
    LogStorage,
    OvertakenError,
    Record,
    Values,
    conditions_of,
    header_of,
    json_of,
    row_of,
    upgrade,
)

FILE_NAME = "trajectories.sqlite"

# Written out, because an index that leaves out unfinished episodes is only used for a query that says so, too.
FINISHED = f"stop <> '{StopReason.UNFINISHED.value}'"
UNFINISHED = f"stop = '{StopReason.UNFINISHED.value}'"

_TOKENS = "(prompt_tokens + completion_tokens)"
# The others are columns.
_KEYS = {
    TrajectoryOrder.STORED: "row",
    TrajectoryOrder.TOKENS: _TOKENS,
    TrajectoryOrder.SECONDS: "(finished - started)",
}

# "OHRL": shown by file(1) and sqlite3, and distinguishes this from any other database.
_APPLICATION_ID = 0x4F48524C
_BUSY_SECONDS = 60.0
_OR = " (or its first bytes are damaged: restore it from a backup)"

# Of the return: a number, or a text ('none', in stores of earlier releases also 'nan'). ``finished``: when it last
# grew, while it is unfinished. ``revision``: how often it has changed. ``scored``: whether anything judged the outcome,
# ``score``: what the newest judgement says; ``reward``: what filters and sorting look at, none when it failed. The
# indices of orders go downwards, so that equal ones come as they were stored.
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS episodes (
    row INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, run_id TEXT NOT NULL, group_id TEXT NOT NULL,
    task_id TEXT NOT NULL, environment TEXT NOT NULL, split TEXT NOT NULL, strategy TEXT NOT NULL,
    base_model TEXT NOT NULL, adapter TEXT, policy_version INTEGER, stop TEXT NOT NULL, failure_kind TEXT,
    nodes INTEGER NOT NULL, turns INTEGER NOT NULL, episode_return NOT NULL,
    started REAL NOT NULL, finished REAL NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, calls INTEGER NOT NULL, steps INTEGER NOT NULL, head INTEGER,
    revision INTEGER NOT NULL DEFAULT 0, scored INTEGER NOT NULL, score, reward REAL
);
CREATE UNIQUE INDEX IF NOT EXISTS episodes_id ON episodes (id);
CREATE INDEX IF NOT EXISTS episodes_run ON episodes (run_id);
CREATE INDEX IF NOT EXISTS episodes_group ON episodes (group_id);
CREATE INDEX IF NOT EXISTS episodes_task ON episodes (task_id);
CREATE INDEX IF NOT EXISTS episodes_split ON episodes (split);
CREATE INDEX IF NOT EXISTS episodes_adapter ON episodes (adapter, policy_version);
CREATE INDEX IF NOT EXISTS episodes_version ON episodes (policy_version);
CREATE INDEX IF NOT EXISTS episodes_stop ON episodes (stop);
CREATE INDEX IF NOT EXISTS episodes_failure ON episodes (failure_kind) WHERE failure_kind IS NOT NULL;
CREATE INDEX IF NOT EXISTS episodes_finished ON episodes (finished) WHERE {FINISHED};
CREATE INDEX IF NOT EXISTS episodes_by_reward ON episodes (reward DESC) WHERE {FINISHED};
CREATE INDEX IF NOT EXISTS episodes_by_tokens ON episodes ({_TOKENS} DESC) WHERE {FINISHED};
DROP INDEX IF EXISTS episodes_reward;
CREATE TABLE IF NOT EXISTS documents (episode INTEGER PRIMARY KEY, start BLOB NOT NULL, end BLOB);
CREATE TABLE IF NOT EXISTS chunks (
    episode INTEGER NOT NULL, first INTEGER NOT NULL, count INTEGER NOT NULL, nodes BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS chunks_episode ON chunks (episode, first);
CREATE TABLE IF NOT EXISTS marks (
    episode INTEGER NOT NULL, node INTEGER NOT NULL, mark TEXT NOT NULL, PRIMARY KEY (episode, node)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS scores (
    row INTEGER PRIMARY KEY AUTOINCREMENT, trajectory_id TEXT NOT NULL, score BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS scores_trajectory ON scores (trajectory_id);
CREATE TABLE IF NOT EXISTS labels (
    row INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, trajectory_id TEXT NOT NULL, label BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS labels_trajectory ON labels (trajectory_id);
CREATE TABLE IF NOT EXISTS names (
    name TEXT NOT NULL, episode INTEGER NOT NULL, PRIMARY KEY (name, episode)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS names_episode ON names (episode);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

_GIVEN = {name: "ifnull(?, 'none')" if name == "episode_return" else "?" for name in COLUMNS}
_COLUMNS = ", ".join(COLUMNS).replace("episode_return", "iif(typeof(episode_return) = 'text', NULL, episode_return)")
_SOME = "IN (SELECT value FROM json_each(?))"
_INSERT = (
    f"INSERT INTO episodes ({', '.join(COLUMNS)}, head, scored, reward) VALUES ({', '.join(_GIVEN.values())}, ?, 0, ?)"
)

# What is wrong with one call, and not with the file.
_OF_ONE_CALL = (StorageError, OverflowError, RecursionError, ValueError, sqlite3.DataError, sqlite3.IntegrityError)

type Work[Answer] = Callable[[Log], Coroutine[Any, Any, Answer]]


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
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._waiting = deque[tuple[str, Work[Any], asyncio.Future[Any]]]()
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
        outcome = loop.create_future()
        self._waiting.append((identity, work, outcome))
        # A moment later, so that all who call now are stored together.
        loop.call_soon(self._wake)
        return await outcome

    def _ask[Answer](self, ask: Callable[[sqlite3.Connection], Answer]) -> Answer:
        self._check_process()
        with explained(self._file), self._reading:
            there = self._file.exists()
            connection = self._reader or (connect(self._file) if there else empty_database(self._file))
            self._reader = None
            try:
                connection.execute("PRAGMA query_only = ON")
                connection.execute("BEGIN")
                answer = ask(connection)
                connection.execute("ROLLBACK")
                # On a disk that is not written from here the next reader looks again whether somebody else does.
                if there and os.access(self._folder, os.W_OK):
                    self._reader = connection
                return answer
            except (ValueError, LookupError, TypeError, OverflowError) as error:
                raise DamagedError(f"a record is damaged, restore the file from a backup: {describe(error)}") from error
            finally:
                if self._reader is None:
                    connection.close()

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
        """Store the waiting calls in one transaction, and wake their callers."""
        with self._settling:
            self._called = False
            group = [self._waiting.popleft() for _ in range(len(self._waiting))]
            outcomes: list[Any] = []
            try:
                with explained(self._file), secrets_looked_up_once():
                    outcomes = self._stored([(identity, work) for identity, work, _ in group])
            except BaseException as error:
                # Closing the connection undoes what was written; the next call opens a new one.
                self._disconnect()
                outcomes = [_stored_not(error)] * len(group)
                raise
            finally:
                settled = zip((future for _, _, future in group), outcomes, strict=True)
                for loop, some in groupby(settled, lambda each: each[0].get_loop()):
                    # No caller waits in a closed loop.
                    with suppress(RuntimeError):
                        loop.call_soon_threadsafe(_wake_callers, tuple(some))

    def _stored(self, group: Sequence[tuple[str, Work[Any]]]) -> list[Any]:
        """The results of the calls, or their errors, once all writes are durable."""
        if not group:
            return []
        connection = self._opened()
        connection.execute("BEGIN IMMEDIATE")
        try:
            outcomes = [_driven(work, connection) for _, work in group]
        except _OF_ONE_CALL as error:
            connection.execute("ROLLBACK")
            for identity, _ in group:
                self._open.pop(identity, None)
            # The error of one leaves the others alone: each gets a transaction of its own. Savepoints would cost all.
            return [_stored_not(error)] if len(group) == 1 else [self._stored([each])[0] for each in group]
        connection.execute("COMMIT")
        return outcomes

    def _opened(self) -> sqlite3.Connection:
        if self._writer is None:
            if not self._file.exists():
                make_database(self._folder)
            self._writer = connect(self._file, durable=self._durable)
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


def _upgrade(connection: sqlite3.Connection) -> None:
    """Make what is lacking, and count, judge and name the episodes again, but on a read-only disk."""
    try:
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}")
        _driven(upgrade, connection)
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if not error.sqlite_errorname.startswith("SQLITE_READONLY"):
            raise
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.execute("CREATE TEMP TABLE names (name TEXT, episode INTEGER)")
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'labels'").fetchone():
            connection.execute("CREATE TEMP TABLE labels (row INTEGER, trajectory_id TEXT, label BLOB)")


def _wake_callers(settled: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in settled:
        if not future.done():  # a cancelled caller waits no more, but it is stored
            (future.set_exception if isinstance(outcome, StorageError) else future.set_result)(outcome)


def _stored_not(error: BaseException) -> StorageError:
    return error if isinstance(error, StorageError) else StorageError(f"not stored: {describe(error)}")


class SqliteLog(Log):
    """As in ``Log``, inside of transactions that the caller opens and ends. No call waits for anything."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._run = connection.execute
        self._run_many = connection.executemany

    async def ids(self, where: TrajectoryFilter) -> Sequence[str]:
        condition, values = _condition_of(where)
        key, direction = _KEYS.get(where.sort, where.sort.value), "DESC" if where.descending else "ASC"
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
        query = f"SELECT row, revision, score, {_COLUMNS} FROM episodes WHERE id {_SOME}"
        found = self._run(query, (_json(ids),))
        return [Episode(header_of(known, score), row, revision) for row, revision, score, *known in found]

    async def episodes(self, ids: Sequence[str], *, unseen: bool = False) -> list[Episode]:
        query = (
            f"SELECT row, revision, head, documents.start, documents.end, score, {_COLUMNS} FROM episodes "
            f"LEFT JOIN documents ON episode = row WHERE id {_SOME}"
        )
        found = self._run(query, (_json(ids),)).fetchall()
        rows = json.dumps([row for row, *_ in found])
        packs, marks = defaultdict[int, list[bytes]](list), defaultdict[int, list[str]](list)
        for held, query in ((packs, "nodes, first FROM chunks"), (marks, "mark, node AS first FROM marks")):
            for row, value, _ in self._run(f"SELECT episode, {query} WHERE episode {_SOME} ORDER BY 1, first", (rows,)):
                held[row].append(value)
        episodes = list[Episode]()
        for row, revision, head, start, end, score, *known in found:
            content = Content(start, packs[row], map(NodeMark.model_validate_json, marks[row]), head, end)
            episodes.append(Episode(header_of(known, score), row, revision, content=content))
        return episodes

    async def write(self, before: Episode | None, header: TrajectorySummary, content: Content) -> Episode:
        reward, values = header.episode_return, row_of(header)
        if before is None:
            row, revision = self._run(_INSERT, (*values.values(), content.head, reward)).lastrowid or 0, 0
        else:
            row, revision = before.number, before.revision + 1
            old = before.place or row_of(before.header)
            changed = {f"{name} = {_GIVEN[name]}, ": new for name, new in values.items() if new != old[name]}
            query = (
                f"UPDATE episodes SET {''.join(changed)}head = ?, revision = ?, "
                f"reward = iif(scored AND NOT ?, reward, ?) WHERE row = ? AND revision = ? AND {UNFINISHED}"
            )
            failed = header.failure is not None
            bound = (*changed.values(), content.head, revision, failed, reward, row, before.revision)
            if self._run(query, bound).rowcount == 0:
                raise OvertakenError(header.id)
        if content.start is not None:
            self._empty(row)
            self._run("INSERT INTO documents VALUES (?, ?, ?)", (row, content.start, content.end))
        elif content.end is not None:
            self._run("UPDATE documents SET end = ? WHERE episode = ?", (content.end, row))
        first = 0 if before is None or content.start is not None else before.header.nodes
        chunks = [(row, first, header.nodes - first, pack) for pack in content.packs]
        self._run_many("INSERT INTO chunks VALUES (?, ?, ?, ?)", chunks)
        marks = [(row, mark.index, json_of(mark, exclude_defaults=True).decode()) for mark in content.marks]
        self._run_many("INSERT OR REPLACE INTO marks VALUES (?, ?, ?)", marks)
        return Episode(header, row, revision, place=values)

    async def drop(self, episode: Episode) -> bool:
        self._empty(episode.number)
        self._run("DELETE FROM names WHERE episode = ?", (episode.number,))
        for table, key in (("episodes", "id"), ("scores", "trajectory_id"), ("labels", "trajectory_id")):
            self._run(f"DELETE FROM {table} WHERE {key} = ?", (episode.header.id,))
        return True

    async def add(self, values: Values, packed: Sequence[bytes]) -> None:
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
            header, score = episode.header, newest and newest.reward
            known = header.turns, header.episode_return, newest is not None, score
            # A failed episode has no reward to be found by, even if it was scored.
            reward = header.episode_return if newest is None or header.failure is not None else score
            query = (
                "UPDATE episodes SET turns = ?, episode_return = ifnull(?, 'none'), scored = ?, score = ?, reward = ? "
                "WHERE row = ?"
            )
            self._run(query, (*known, reward, episode.number))

    async def name(self, episode: Episode, names: Sequence[str], seen: int) -> None:
        self._run("DELETE FROM names WHERE episode = ?", (episode.number,))
        self._run_many("INSERT INTO names VALUES (?, ?)", [(name, episode.number) for name in names])

    async def state(self) -> str:
        changed = f"SELECT row, revision FROM episodes WHERE {UNFINISHED} ORDER BY row DESC LIMIT {WATCHED}"
        return str([self._run(query).fetchall() for query in ("SELECT name, seq FROM sqlite_sequence", changed)])

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
    if where.label is not None:
        terms.append("row IN (SELECT episode FROM names WHERE name = ?)")
        values.append(where.label)
    if where.contains is not None:
        terms.append(f"({' OR '.join(f'instr({name}, ?)' for name in SEARCHED)})")
        values += [where.contains] * len(SEARCHED)
    return " AND ".join(terms) or "TRUE", values


def _json(ids: Sequence[str]) -> str:
    """A query may have only so many values. In JSON a NUL ends a text, and no id has one."""
    return json.dumps([each for each in ids if "\0" not in each])


def connect(file: Path, *, durable: bool = True) -> sqlite3.Connection:
    """Open an existing store, and make what it lacks. ``durable``: a commit returns only when it is on the disk. Raises
    ``StorageError``."""
    with explained(file):
        connection = _open(file)
        try:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("PRAGMA fullfsync = ON")
            # Pages of growing episodes change again and again: the longer they wait, the fewer times they are moved.
            connection.execute("PRAGMA wal_autocheckpoint = 4000")
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if application != _APPLICATION_ID or version > SCHEMA_VERSION:
                what = f"is a database of something else, or of a later openhands_rl_plugin (schema version {version})"
                raise StorageError(f"{file} {what}; upgrade, or choose another path in [rl.storage]{_OR}")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'names'").fetchone():
                _upgrade(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def empty_database(file: Path) -> sqlite3.Connection:
    """A store in memory, in the place of one that nobody has made yet."""
    return _opened(file, "mode=memory").executescript(_SCHEMA).connection


def make_database(folder: Path) -> None:
    """Put an empty store in ``folder``, unless another process was faster. It is never seen half made.

    Raises ``StorageError``, and leaves nothing behind when it fails.
    """
    file = folder / FILE_NAME
    with explained(file):
        for each in reversed((folder, *folder.parents)):
            if not each.is_dir():
                each.mkdir(mode=0o700, exist_ok=True)
                sync(each.parent)
        with locked_folder(folder):
            if file.exists():
                return
            with replacing(file, PRIVATE) as draft, closing(_open(draft)) as connection:
                # Until it has its name, a crash loses nothing: it is made again.
                connection.executescript(f"PRAGMA synchronous = OFF; {_SCHEMA}; PRAGMA journal_mode = WAL")


@contextmanager
def explained(file: Path) -> Iterator[None]:
    """Turn errors of ``file`` into a ``StorageError`` with the remedy."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
        raise StorageError(f"{_cause(error, file)}, or choose another path in [rl.storage]") from error


def torn(file: Path, cause: str) -> str:
    """The error text for a file that SQLite cannot read, with the remedy."""
    return (
        f"{file} is damaged or no database ({cause}); restore it from a backup, copy what is readable with "
        f"sqlite3 {file} .recover | sqlite3 NEW/{FILE_NAME}"
    )


def _cause(error: Exception, file: Path) -> str:
    # Python cannot read the text of an error that quotes a damaged text.
    if isinstance(error, UnicodeDecodeError) or "decode to UTF-8" in str(error):
        return torn(file, "it has a text that is none")
    if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return torn(file, str(error))
    return f"{file} cannot be used ({describe(error)}): free some space, change its permissions, end who holds it"


def _open(file: Path) -> sqlite3.Connection:
    connection = _opened(file, "mode=rw")
    try:
        connection.execute("PRAGMA user_version")
        return connection
    except sqlite3.OperationalError as error:
        connection.close()
        # SQLite creates two files next to the store, unless it is opened as immutable.
        if error.sqlite_errorname != "SQLITE_CANTOPEN" or os.access(file.parent, os.W_OK):
            raise
    log = file.with_name(f"{file.name}-wal")
    if log.exists() and log.stat().st_size:
        raise StorageError(f"{log} has records that are read from a writable disk only; copy {file.parent} to one")
    return _opened(file, "mode=ro&immutable=1")


def _opened(file: Path, how: str) -> sqlite3.Connection:
    # Used by one thread at a time, but not always by the same.
    address = f"{file.absolute().as_uri()}?{how}"
    return sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
