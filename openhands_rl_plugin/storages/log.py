"""An append-only log of JSON documents in a folder of segment files.

A segment is JSON Lines, one record a line:

    {"crc32":"9a3f0c11","stored":1763700000.123456,"id":"...","record":{...}}

The checksum covers everything after the comma that follows it, up to the end of the line. A line without its newline
is a write that never finished: readers stop before it, and whoever appends next to that segment cuts it off. A finished
line with a wrong checksum is damage, which is an error and is never skipped.

Every writer owns the segment that it appends to by a lock on the file, which the kernel drops when the process dies, so
several processes can write to one folder and all of them see every record.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.errors import StorageError, describe

SEGMENT_BYTES = 64 * 1024 * 1024

_SUFFIX = ".jsonl"
_HEAD = re.compile(rb'\{"crc32":"([0-9a-f]{8})",("stored":([0-9.]+),"id":("(?:[^"\\]|\\.)*"),"record":)')
_CHECKED_FROM = len('{"crc32":"00000000",')
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# macOS has no fdatasync; there fsync does the same and a little more.
_flush_to_disk = getattr(os, "fdatasync", os.fsync)


class Entry(NamedTuple):
    """Where one record lies. Entries sort by the time at which they were stored."""

    stored: float
    segment: str
    offset: int
    length: int
    id: str


class AppendLog:
    """One folder of segments. Blocking; safe to use from several threads and several processes.

    ``unique``: a record whose id is known is not stored again. ``durable``: ``append`` returns only after the records
    are on the disk. A segment is finished when it has reached ``segment_bytes``. Every method raises ``StorageError``.
    """

    def __init__(self, folder: Path, *, unique: bool, durable: bool = True, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._unique = unique
        self._durable = durable
        self._segment_bytes = segment_bytes
        self._lock = threading.RLock()
        self._open: _OpenSegment | None = None
        self._index: dict[str, list[Entry]] = {}
        self._ends: dict[str, int] = {}

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        """Write ``(id, JSON document)`` pairs, all or none of them."""
        with self._lock, _explained(self._folder):
            if self._unique:
                records = self._unknown(records)
            if not records:
                return
            segment = self._segment_to_append_to()
            now = time.time()
            try:
                segment.append(b"".join(_encode(now, id_, document) for id_, document in records), self._durable)
            except OSError:
                self.close()
                raise
            self._scan(segment.path)

    def refresh(self) -> None:
        """Take in what this and other processes have appended since the last call."""
        with self._lock, _explained(self._folder):
            sizes = {path: path.stat().st_size for path in self._segments()}
            names = {path.name: size for path, size in sizes.items()}
            if any(names.get(name, -1) < end for name, end in self._ends.items()):
                # A segment was removed or shortened by hand, so what was known about any of them may be wrong.
                self._index, self._ends = {}, {}
            for path, size in sizes.items():
                if size > self._ends.get(path.name, 0):
                    self._scan(path)

    def entries(self) -> list[Entry]:
        """The first entry of every id, oldest first, as of the last refresh."""
        with self._lock:
            return sorted(min(entries) for entries in self._index.values())

    def entries_of(self, id_: str) -> list[Entry]:
        """All entries of one id, oldest first, as of the last refresh."""
        with self._lock:
            return sorted(self._index.get(id_, ()))

    def read(self, entries: Iterable[Entry]) -> Iterator[bytes]:
        """The documents behind ``entries``, in the same order."""
        with _explained(self._folder):
            for entry in entries:
                with open(self._folder / entry.segment, "rb") as file:
                    line = os.pread(file.fileno(), entry.length, entry.offset)
                head = _check(line, self._folder / entry.segment, entry.offset)
                yield line[head.end() : -2]

    def close(self) -> None:
        """Let go of the segment. The log can be used again; it then takes up a segment anew."""
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def _unknown(self, records: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        if self._open is None:
            self.refresh()
        unknown: dict[str, bytes] = {}
        for id_, document in records:
            if id_ not in self._index:
                unknown.setdefault(id_, document)
        return list(unknown.items())

    def _segments(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}")) if self._folder.is_dir() else []

    def _scan(self, path: Path) -> None:
        at = self._ends.get(path.name, 0)
        with open(path, "rb") as file:
            file.seek(at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                head = _check(line, path, at)
                entry = Entry(float(head[3]), path.name, at, len(line), json.loads(head[4]))
                self._index.setdefault(entry.id, []).append(entry)
                at += len(line)
                self._ends[path.name] = at

    def _segment_to_append_to(self) -> _OpenSegment:
        if self._open is not None and self._open.size >= self._segment_bytes:
            self.close()
        if self._open is None:
            self._open = self._take_up() or self._create()
        return self._open

    def _take_up(self) -> _OpenSegment | None:
        """The newest unfinished segment that no living writer owns, with what a dead one left half-written cut off."""
        for path in reversed(self._segments()):
            if path.stat().st_size >= self._segment_bytes:
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            if not _try_lock(descriptor):
                os.close(descriptor)
                continue
            self._scan(path)
            size = self._ends.get(path.name, 0)
            os.ftruncate(descriptor, size)
            return _OpenSegment(path, descriptor, size)
        return None

    def _create(self) -> _OpenSegment:
        _make_folder(self._folder)
        while True:
            path = self._folder / f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            # Another process may take up the new file before it is locked here; it is welcome to it.
            if _try_lock(descriptor):
                break
            os.close(descriptor)
        if self._durable:
            _flush_folder(self._folder)
        return _OpenSegment(path, descriptor, 0)


@dataclass
class _OpenSegment:
    """A locked segment; ``size`` is the end of the last acknowledged record, in bytes."""

    path: Path
    descriptor: int
    size: int

    def append(self, data: bytes, durable: bool) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]
            if durable:
                _flush_to_disk(self.descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.size)
            raise
        self.size += len(data)

    def close(self) -> None:
        os.close(self.descriptor)


def _encode(stored: float, id_: str, document: bytes) -> bytes:
    checked = b'"stored":%.6f,"id":%s,"record":%s}' % (stored, json.dumps(id_).encode(), document)
    return b'{"crc32":"%08x",%s\n' % (zlib.crc32(checked), checked)


def _check(line: bytes, path: Path, offset: int) -> re.Match[bytes]:
    head = _HEAD.match(line)
    if head is None or zlib.crc32(memoryview(line)[_CHECKED_FROM:-1]) != int(head[1], 16):
        raise StorageError(
            f"{path} is damaged at byte {offset}: the checksum of the record there is wrong; "
            "restore the file from a backup, or delete that line to give up the one record"
        )
    return head


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_folder(folder: Path) -> None:
    """Create ``folder`` and what is missing above it, all of them private, unlike ``mkdir(parents=True)``."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            cause = f"no space left for {folder} ({error.strerror}), the record was not stored; free some space"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            cause = f"{error.filename or folder} may not be written or read ({error.strerror}); change its permissions"
        else:
            cause = f"{folder} cannot be used ({describe(error)}); check the disk"
        raise StorageError(f"{cause}, or choose another path in [rl.storage]") from error
