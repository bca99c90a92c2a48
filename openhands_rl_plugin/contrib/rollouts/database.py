"""The SQLite file of the queue: its tables, transactions, and errors.

- ``tasks``: what was submitted, and how it stands; ``run`` names its episodes in the store;
- ``sessions``: the episodes; whoever plays one is its ``owner``, and only the owner may store its ``result``, once;
- ``events``: what happened, the newest of them.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openhands_rl_plugin.core.errors import StorageError, describe

FILE = "rollouts.sqlite"
_VERSION = 2
_APPLICATION_ID = 0x4F48524A
_BUSY_SECONDS = 60.0
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS tasks (
    task_id TEXT PRIMARY KEY, run TEXT NOT NULL, digest TEXT NOT NULL, request TEXT NOT NULL, status TEXT NOT NULL,
    total INTEGER NOT NULL, policy_version INTEGER, created REAL NOT NULL, updated REAL NOT NULL,
    callback_at REAL, -- when it is to be sent next; NULL: there is none, or it is done with
    callback_tries INTEGER NOT NULL DEFAULT 0,
    collected INTEGER NOT NULL DEFAULT 0 -- whoever submitted it has its results
);
CREATE INDEX IF NOT EXISTS tasks_status ON tasks (status, updated);
CREATE INDEX IF NOT EXISTS tasks_callback ON tasks (callback_at) WHERE callback_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS sessions (
    row INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL,
    sample INTEGER NOT NULL, state TEXT NOT NULL, priority INTEGER NOT NULL, waiting INTEGER NOT NULL DEFAULT 1,
    not_before REAL NOT NULL DEFAULT 0, attempt INTEGER NOT NULL DEFAULT 0, losses INTEGER NOT NULL DEFAULT 0,
    owner TEXT, claimed REAL, ended REAL, usable INTEGER NOT NULL DEFAULT 0, cancelled TEXT NOT NULL DEFAULT '',
    seconds REAL, tokens INTEGER, result BLOB
);
CREATE INDEX IF NOT EXISTS sessions_task ON sessions (task_id, sample);
CREATE INDEX IF NOT EXISTS sessions_waiting ON sessions (priority DESC, row) WHERE waiting = 1;
CREATE INDEX IF NOT EXISTS sessions_owner ON sessions (owner) WHERE owner IS NOT NULL;
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, body TEXT NOT NULL);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
"""
_SINCE_1 = f"""
ALTER TABLE tasks ADD COLUMN collected INTEGER NOT NULL DEFAULT 0;
PRAGMA user_version = {_VERSION};
"""


class Database:
    """The file in ``folder``, made where it is missing. A commit is on the disk when it returns.

    For several processes, and for several threads of one. Raises ``StorageError``.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self._lock = threading.Lock()
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            self._connection = sqlite3.connect(
                self.file, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.row_factory = sqlite3.Row
            version = self._version()
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
        if version != _VERSION:
            self._upgrade()

    def _version(self) -> int:
        """0 in a new file. Raises ``StorageError`` for a file of something else."""
        found, version = (
            self._connection.execute(f"PRAGMA {each}").fetchone()[0] for each in ("application_id", "user_version")
        )
        if (found, version) not in ((0, 0), (_APPLICATION_ID, 1), (_APPLICATION_ID, _VERSION)):
            raise StorageError(f"{self.file} is no queue of rollouts of this version: choose another --store")
        return version

    def _upgrade(self) -> None:
        with self.writing() as connection:
            # Asked again where nobody else can write: another starter may have been faster.
            script = {0: _SCHEMA, 1: _SINCE_1}.get(self._version(), "")
            for statement in script.split(";\n"):  # `executescript` would commit before it begins
                connection.execute(statement)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One thread at a time, in one state of the file."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One writer at a time over all processes; all of the block is stored, or nothing."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock, self._explained():
            self._connection.execute(begin)
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StorageError(f"the queue {self.file} cannot be used: {describe(error)}") from error
