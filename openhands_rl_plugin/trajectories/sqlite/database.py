"""The SQLite file of a store: its creation, opening and errors. Its tables:

- ``episodes``: one row for each, with the columns of ``EpisodeHeader``, where the episode stands, and its reward;
- ``documents``: what is known at the start and at the end of an episode, as packed JSON;
- ``chunks``: the nodes, packed as they came; ``marks``: what became known of a node later, as JSON;
- ``scores``: the judgements, as packed JSON, in the order in which they came; ``labels``: the same of labels.

A store of an earlier release gets the tables and indices that it lacks when it is opened, and is counted again.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from openhands_rl_plugin.core.errors import StorageError, describe
from openhands_rl_plugin.core.files import PRIVATE, locked_folder, replacing, sync
from openhands_rl_plugin.core.records import TrajectoryOrder
from openhands_rl_plugin.core.types import SCHEMA_VERSION, StopReason

FILE_NAME = "trajectories.sqlite"

# Written out, because an index that leaves out unfinished episodes is only used for a query that says so, too.
FINISHED = f"stop <> '{StopReason.UNFINISHED.value}'"
UNFINISHED = f"stop = '{StopReason.UNFINISHED.value}'"

KEYS = {
    TrajectoryOrder.STORED: "row",
    TrajectoryOrder.FINISHED: "finished",
    TrajectoryOrder.REWARD: "reward",
    TrajectoryOrder.TURNS: "turns",
    TrajectoryOrder.TOKENS: "(prompt_tokens + completion_tokens)",
    TrajectoryOrder.SECONDS: "(finished - started)",
}

# "OHRL": shown by file(1) and sqlite3, and distinguishes this from any other database.
_APPLICATION_ID = 0x4F48524C
_BUSY_SECONDS = 60.0
_FULL = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_SHMSIZE", "ENOSPC", "EDQUOT", "EFBIG")
_OR = " (or its first bytes are damaged: restore it from a backup)"
# Smaller than usual, because what does not fill a page is lost and a turn is about two pages.
_PAGE_BYTES = 2048

# Of the return: a number, or a text ('nan', because SQLite makes NULL of a NaN, or 'none'). ``finished``: when it last
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
CREATE INDEX IF NOT EXISTS episodes_environment ON episodes (environment);
CREATE INDEX IF NOT EXISTS episodes_split ON episodes (split);
CREATE INDEX IF NOT EXISTS episodes_strategy ON episodes (strategy);
CREATE INDEX IF NOT EXISTS episodes_adapter ON episodes (adapter, policy_version);
CREATE INDEX IF NOT EXISTS episodes_version ON episodes (policy_version);
CREATE INDEX IF NOT EXISTS episodes_stop ON episodes (stop);
CREATE INDEX IF NOT EXISTS episodes_failure ON episodes (failure_kind) WHERE failure_kind IS NOT NULL;
CREATE INDEX IF NOT EXISTS episodes_finished ON episodes (finished) WHERE {FINISHED};
CREATE INDEX IF NOT EXISTS episodes_by_reward ON episodes (reward DESC) WHERE {FINISHED};
CREATE INDEX IF NOT EXISTS episodes_by_tokens ON episodes ({KEYS[TrajectoryOrder.TOKENS]} DESC) WHERE {FINISHED};
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
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
NEWEST_INDEX = "episodes_split"
"""A store without it was made by an earlier release, and lacks this or more."""


def connect(file: Path, *, durable: bool = True) -> sqlite3.Connection:
    """Open an existing store. ``durable``: a commit returns only when it is on the disk. Raises ``StorageError``."""
    with explained(file):
        connection = _open(file)
        try:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("PRAGMA fullfsync = ON")
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if application != _APPLICATION_ID:
                raise StorageError(f"{file} is a database of something else; choose another path in [rl.storage]{_OR}")
            if version > SCHEMA_VERSION:
                newer = f"{file} has schema version {version}, newer than {SCHEMA_VERSION}"
                raise StorageError(f"{newer}; upgrade openhands_rl_plugin{_OR}")
        except BaseException:
            connection.close()
            raise
        return connection


def make_tables(connection: sqlite3.Connection) -> None:
    """Make what is lacking, inside of a transaction that the caller opens and ends."""
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)


def empty_database() -> sqlite3.Connection:
    """A store in memory, in the place of one that nobody has made yet."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    make_tables(connection)
    return connection


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
                connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
                # Until it has its name, a crash loses nothing: it is made again.
                connection.execute("PRAGMA journal_mode = OFF")
                connection.execute("PRAGMA synchronous = OFF")
                make_tables(connection)
                connection.execute("PRAGMA journal_mode = WAL")


@contextmanager
def explained(file: Path) -> Iterator[None]:
    """Turn errors of ``file`` into a ``StorageError`` with the remedy."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
        raise StorageError(f"{_cause(error, file)}, or choose another path in [rl.storage]") from error


def torn(file: Path, cause: str) -> str:
    """What is wrong with a file that SQLite cannot read, and what to do."""
    return (
        f"{file} is damaged or no database ({cause}); restore it from a backup, copy what is readable with "
        f"sqlite3 {file} .recover | sqlite3 NEW/{FILE_NAME}"
    )


def _cause(error: Exception, file: Path) -> str:
    if isinstance(error, UnicodeDecodeError) or "decode to UTF-8" in str(error):
        # Python cannot read the text of SQLite's error, which quotes what is damaged.
        return torn(file, "it has a text that is none")
    name = getattr(error, "sqlite_errorname", "") or errno.errorcode.get(getattr(error, "errno", None) or 0, "")
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return torn(file, str(error))
    if name in _FULL:
        return f"no space left for {file}, or its disk fails ({error}); nothing was stored; free some space"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "EACCES", "EPERM", "EROFS")):
        return f"{file} and its folder may not be written or read ({error}); change their permissions"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"{file} is held by another process for more than {_BUSY_SECONDS:.0f} s ({error}); end that process"
    return f"{file} cannot be used ({describe(error)}); check the disk"


def _open(file: Path) -> sqlite3.Connection:
    connection = _opened(file, "mode=rw")
    try:
        connection.execute("PRAGMA user_version")
        return connection
    except sqlite3.OperationalError as error:
        connection.close()
        # SQLite makes two files beside the store, unless it knows that nobody writes.
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
