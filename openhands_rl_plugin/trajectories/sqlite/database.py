"""The SQLite file of a store: its creation, opening and errors.

It is made whole under another name and then renamed, so that it is never seen half made. Its tables:

- ``episodes``: one row for each, with the columns of ``EpisodeHeader``, where the episode stands, and its reward;
- ``documents``: what is known at the start and at the end of an episode, as packed JSON;
- ``chunks``: the nodes, packed as they came; ``marks``: what became known of a node later, as JSON;
- ``scores``: the judgements, as packed JSON, in the order in which they came; ``labels``: the same of labels.

A store of an earlier release gets what it lacks: the table of labels, rewards by the newest judgement, turns and
returns of all segments, indices of orders.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import groupby
from pathlib import Path

from openhands_rl_plugin.core.errors import StorageError, describe
from openhands_rl_plugin.core.files import locked_folder, sync
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.records import EpisodeEnd
from openhands_rl_plugin.core.types import SCHEMA_VERSION, Score, pays_rewards
from openhands_rl_plugin.trajectories.sqlite.conditions import FINISHED, INDICES, NO_RETURN
from openhands_rl_plugin.trajectories.sqlite.reading import has_labels, read_nodes
from openhands_rl_plugin.trajectories.storages.header import Spine
from openhands_rl_plugin.trajectories.storages.packing import parsed_json

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


FILE_NAME = "trajectories.sqlite"

# "OHRL": shown by file(1) and sqlite3, and distinguishes this from any other database.
_APPLICATION_ID = 0x4F48524C
_BUSY_SECONDS = 60.0
_OR = " (or its first bytes are damaged: restore it from a backup)"
# Smaller than usual, because what does not fill a page is lost and a turn is about two pages.
_PAGE_BYTES = 2048

_SCHEMA = f"""
CREATE TABLE episodes (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    environment TEXT NOT NULL,
    split TEXT NOT NULL,
    strategy TEXT NOT NULL,
    base_model TEXT NOT NULL,
    adapter TEXT,
    policy_version INTEGER,
    stop TEXT NOT NULL,
    failure_kind TEXT,
    nodes INTEGER NOT NULL,
    turns INTEGER NOT NULL,
    episode_return NOT NULL, -- a number, or a text: 'nan', because SQLite makes NULL of a NaN, or 'none'
    started REAL NOT NULL,
    finished REAL NOT NULL, -- when it last grew, while it is unfinished
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    head INTEGER,
    revision INTEGER NOT NULL DEFAULT 0, -- how often it has grown
    scored INTEGER NOT NULL, -- whether anything judged the outcome
    score, -- the reward of the newest judgement: a number, the text 'nan', or NULL
    reward REAL -- what filters and sorting look at: the newest judgement, or else the return; none when it failed
);
CREATE UNIQUE INDEX episodes_id ON episodes (id);
CREATE INDEX episodes_run ON episodes (run_id);
CREATE INDEX episodes_group ON episodes (group_id);
CREATE INDEX episodes_task ON episodes (task_id);
CREATE INDEX episodes_environment ON episodes (environment);
CREATE INDEX episodes_strategy ON episodes (strategy);
CREATE INDEX episodes_adapter ON episodes (adapter, policy_version);
CREATE INDEX episodes_version ON episodes (policy_version);
CREATE INDEX episodes_stop ON episodes (stop);
CREATE INDEX episodes_failure ON episodes (failure_kind) WHERE failure_kind IS NOT NULL;
CREATE INDEX episodes_finished ON episodes (finished) WHERE stop <> 'unfinished';
{INDICES}CREATE TABLE documents (episode INTEGER PRIMARY KEY, start BLOB NOT NULL, end BLOB);
CREATE TABLE chunks (episode INTEGER NOT NULL, first INTEGER NOT NULL, count INTEGER NOT NULL, nodes BLOB NOT NULL);
CREATE UNIQUE INDEX chunks_episode ON chunks (episode, first);
CREATE TABLE marks (
    episode INTEGER NOT NULL, node INTEGER NOT NULL, mark TEXT NOT NULL, PRIMARY KEY (episode, node)
) WITHOUT ROWID;
CREATE TABLE scores (row INTEGER PRIMARY KEY AUTOINCREMENT, trajectory_id TEXT NOT NULL, score BLOB NOT NULL);
CREATE INDEX scores_trajectory ON scores (trajectory_id);
{LABELS}
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


def connect(file: Path, *, durable: bool = True) -> sqlite3.Connection:
    """Open an existing store. ``durable``: a commit returns only when it is on the disk. Raises ``StorageError``."""
    with explained(file):
        connection = _open(file)
        try:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("PRAGMA fullfsync = ON")
            _check_version(connection, file)
            upgrade(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def make_database(folder: Path) -> None:
    """Put an empty store in ``folder``, unless another process was faster.

    Raises ``StorageError``, and leaves nothing behind when it fails.
    """
    make_folder(folder)
    file, draft = folder / FILE_NAME, folder / f"{FILE_NAME}.new"
    with explained(file), locked_folder(folder):
        if file.exists():
            return
        # What a killed process has left; no other is at it while the folder is locked.
        draft.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        try:
            with closing(_open(draft)) as connection:
                connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
                # Until it has its name, a crash loses nothing: it is made again.
                connection.execute("PRAGMA journal_mode = OFF")
                connection.execute("PRAGMA synchronous = OFF")
                connection.executescript(_SCHEMA)
                connection.execute("PRAGMA journal_mode = WAL")
            sync(draft)
            draft.rename(file)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync(folder)


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its missing parents, all of them private, unlike ``mkdir(parents=True)``."""
    with explained(folder):
        _make_folder(folder)


@contextmanager
def explained(file: Path) -> Iterator[None]:
    """Turn errors of ``file`` into a ``StorageError`` with the remedy."""
    try:
        yield
    except sqlite3.Error as error:
        cause = torn(file, str(error)) if _is_damage(error) else _cause(error, file)
        raise StorageError(f"{cause}, or choose another path in [rl.storage]") from error
    except UnicodeDecodeError as error:
        # Python cannot read the text of SQLite's error, which quotes what is damaged.
        raise StorageError(torn(file, "it has a text that is none")) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            cause = f"no space left for {file} ({error.strerror}), nothing was stored; free some space"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            cause = f"{error.filename or file} may not be written or read ({error.strerror}); change its permissions"
        else:
            cause = f"{file} cannot be used ({describe(error)}); check the disk"
        raise StorageError(f"{cause}, or choose another path in [rl.storage]") from error


def torn(file: Path, cause: str) -> str:
    """What is wrong with a file that SQLite cannot read, and what to do."""
    return (
        f"{file} is damaged or no database ({cause}); restore it from a backup, copy what is readable with "
        f"sqlite3 {file} .recover | sqlite3 NEW/{FILE_NAME}"
    )


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
    return sqlite3.connect(
        f"{file.absolute().as_uri()}?{how}",
        uri=True,
        timeout=_BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )


def _check_version(connection: sqlite3.Connection, file: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION_ID:
        raise StorageError(f"{file} is a database of something else; choose another path in [rl.storage]{_OR}")
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"{file} has schema version {version}, newer than {SCHEMA_VERSION}; upgrade openhands_rl_plugin{_OR}"
        )


def _is_damage(error: sqlite3.Error) -> bool:
    name = getattr(error, "sqlite_errorname", "")
    return name == "SQLITE_NOTADB" or name.startswith("SQLITE_CORRUPT") or "decode to UTF-8" in str(error)


def _cause(error: sqlite3.Error, file: Path) -> str:
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_FULL" or name in ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_SHMSIZE"):
        return f"no space left for {file}, or its disk fails ({error}); nothing was stored; free some space"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return f"{file} and its folder may not be written or read ({error}); change their permissions"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"{file} is held by another process for more than {_BUSY_SECONDS:.0f} s ({error}); end that process"
    return f"{file} cannot be used ({describe(error)}); check the disk"


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync(folder.parent)
