"""What is said in the episodes of a store, and why their prompts break, in a cache file that may be deleted any time.

A text is found by its words, in that order, whatever stands between them but letters and digits; case and accents do
not matter. Only finished episodes are in it. Whoever asks first lets it ``update``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import batched
from pathlib import Path

from openhands_rl_plugin.core.browsing.listing import Browsable
from openhands_rl_plugin.core.browsing.terms import Match
from openhands_rl_plugin.core.errors import StorageError, describe
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.trajectories.drift.breaks import breaks_of
from openhands_rl_plugin.trajectories.drift.causes import cause_of

_FORMAT = "1"
_BATCH, _PAGE = 8, 256
_LONGEST = 2_000_000
"""Characters of an episode that are looked through."""
_BUSY_SECONDS = 30.0
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE episodes (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE);
CREATE TABLE causes (number INTEGER NOT NULL, cause TEXT NOT NULL, PRIMARY KEY (number, cause)) WITHOUT ROWID;
CREATE VIRTUAL TABLE texts USING fts5(text, content='', tokenize='unicode61 remove_diacritics 2');
"""

_Entry = tuple[str, str, frozenset[str]]
"""Id, text and causes of an episode."""


def cache_file(name: str) -> Path:
    """Where the index of the store ``name`` lies."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "openhands_rl_plugin" / "search" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.sqlite"


class TextIndex:
    """A ``TextLookup`` in a file. With another ``identity``, as of a store in another's place, it is made anew."""

    def __init__(self, file: Path, identity: str = "") -> None:
        self._file = file
        self._identity = f"{_FORMAT} {identity}"
        self._lock = threading.Lock()
        self._updating = asyncio.Lock()
        self.done, self.total = 0, 0
        """Episodes that are in it, and that there are."""

    async def having(self, text: str) -> Collection[str]:
        """The ids of the episodes with these words. Raises ``StorageError``."""
        if not any(sign.isalnum() for sign in text):
            return ()
        phrase = '"' + text.replace('"', '""').replace("\0", " ") + '"'
        query = "SELECT id FROM texts JOIN episodes ON number = texts.rowid WHERE texts MATCH ? ORDER BY number DESC"
        return await asyncio.to_thread(self._ids, query, phrase)

    async def breaking(self, any_of: Iterable[Match]) -> Collection[str]:
        """The ids of the episodes with a break of one of these causes. Raises ``StorageError``."""
        matches = tuple(any_of)
        found = await asyncio.to_thread(self._ids, "SELECT DISTINCT cause FROM causes")
        named = [cause for cause in found if any(each.holds(cause) for each in matches)]
        slots = ", ".join("?" * len(named))
        query = f"SELECT DISTINCT id FROM causes JOIN episodes USING (number) WHERE cause IN ({slots}) ORDER BY number"
        return await asyncio.to_thread(self._ids, query, *named)

    async def update(self, storage: TrajectoryStorage, advanced: Callable[[int, int], None] | None = None) -> None:
        """Take in what has ended since; ``advanced`` hears how many of how many. Raises ``StorageError``."""
        async with self._updating:
            before = await asyncio.to_thread(self._fact, "cursor")
            changes = await storage.changed_since(before or None) if isinstance(storage, Browsable) else None
            self.done = await asyncio.to_thread(self._count)
            if changes is not None and before and not changes.more:
                self.total = self.done + len(changes.ended)
                pages = _as_pages(changes.ended)
            else:
                self.total = await storage.count()
                pages = self._missing(storage)
            async for page in pages:
                for batch in batched(page, _BATCH):
                    found = [trajectory async for trajectory, _ in storage.find(TrajectoryFilter(ids=batch))]
                    await asyncio.to_thread(self._add, found)
                    self.done += len(batch)
                    if advanced is not None:
                        advanced(self.done, self.total)
            if changes is not None and changes.cursor != before:
                await asyncio.to_thread(self._note, "cursor", changes.cursor)

    async def _missing(self, storage: TrajectoryStorage) -> AsyncIterator[list[str]]:
        """The ids of finished episodes that are not in it yet, page by page."""
        known = set(await asyncio.to_thread(self._ids, "SELECT id FROM episodes"))
        where = TrajectoryFilter(limit=_PAGE)
        while page := [each.id async for each in storage.summaries(where)]:
            yield [identity for identity in page if identity not in known]
            where = where.model_copy(update={"after": page[-1]})

    def _ids(self, query: str, *values: str) -> list[str]:
        with self._opened() as connection:
            return [each for (each,) in connection.execute(query, values)]

    def _count(self) -> int:
        with self._opened() as connection:
            return connection.execute("SELECT count(*) FROM episodes").fetchone()[0]

    def _fact(self, name: str) -> str:
        with self._opened() as connection:
            found = connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
            return found[0] if found else ""

    def _note(self, name: str, value: str) -> None:
        with self._opened() as connection:
            connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def _add(self, found: Sequence[Trajectory]) -> None:
        entries = [_entry(trajectory) for trajectory in found]
        with self._opened() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for identity, text, causes in entries:
                row = connection.execute("INSERT OR IGNORE INTO episodes (id) VALUES (?)", (identity,))
                if row.rowcount:
                    connection.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (row.lastrowid, text))
                    connection.executemany(
                        "INSERT INTO causes VALUES (?, ?)", [(row.lastrowid, each) for each in causes]
                    )
            connection.execute("COMMIT")

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                self._make_if_needed()
            with closing(self._connect()) as connection:
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise StorageError(
                f"{self._file} cannot be used ({describe(error)}); delete it: it is only a cache"
            ) from error

    def _make_if_needed(self) -> None:
        """One that is damaged, or of another store or release, is made anew."""
        if self._file.exists():
            with suppress(sqlite3.Error), closing(self._connect()) as connection:
                found = connection.execute("SELECT value FROM facts WHERE name = 'identity'").fetchone()
                if found == (self._identity,):
                    return
            for each in (self._file, *self._file.parent.glob(f"{self._file.name}-*")):
                each.unlink(missing_ok=True)
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        with closing(self._connect()) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA)
            connection.execute("INSERT INTO facts VALUES ('identity', ?)", (self._identity,))

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._file, timeout=_BUSY_SECONDS, isolation_level=None)
        # What is lost is found again.
        connection.execute("PRAGMA synchronous = OFF")
        return connection


async def _as_pages(ids: Sequence[str]) -> AsyncIterator[list[str]]:
    yield list(ids)


def _entry(trajectory: Trajectory) -> _Entry:
    parts: list[str] = []
    left = _LONGEST
    for node in trajectory.nodes:
        said = [node.message.content or "", *(f"{call.name} {call.arguments}" for call in node.message.tool_calls)]
        for text in said:
            parts.append(text[:left])
            left -= len(parts[-1])
    causes = frozenset(cause_of(trajectory, each).name.lower() for each in breaks_of(trajectory))
    # A form feed is no part of a word, so no text is found across two messages' ends alone.
    return trajectory.id, "\f".join(parts).encode("utf-8", "replace").decode(), causes
