"""Reads the stores of schema version 1, which were folders of JSON Lines.

One record a line, in segment files that several processes appended to:

    {"crc32":"9a3f0c11","stored":1763700000.123456,"id":"...","record":{...}}

The checksum covers everything after the comma that follows it, up to the end of the line. A line without its newline
is a write that never finished. A finished line with a wrong checksum is damage, which is an error and is never skipped.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.errors import StorageError

_HEAD = re.compile(rb'\{"crc32":"([0-9a-f]{8})",("stored":([0-9.]+),"id":("(?:[^"\\]|\\.)*"),"record":)')
_CHECKED_FROM = len('{"crc32":"00000000",')


class _Entry(NamedTuple):
    stored: float
    segment: str
    offset: int
    length: int
    id: str


def is_legacy(folder: Path) -> bool:
    """Whether a store of schema version 1 lies in ``folder``."""
    return any(True for _ in (folder / "trajectories").glob("*.jsonl"))


def legacy_trajectories(folder: Path) -> Iterator[bytes]:
    """The JSON of all trajectories, oldest first, each id once. Raises ``StorageError`` for damage."""
    known: set[str] = set()
    for entry in _entries(folder / "trajectories"):
        if entry.id not in known:
            known.add(entry.id)
            yield _document(folder / "trajectories", entry)


def legacy_scores(folder: Path) -> Iterator[bytes]:
    """The JSON of all scores, oldest first. Raises ``StorageError`` for damage."""
    return (_document(folder / "scores", entry) for entry in _entries(folder / "scores"))


def _entries(folder: Path) -> list[_Entry]:
    return sorted(entry for path in folder.glob("*.jsonl") for entry in _scan(path))


def _scan(path: Path) -> Iterator[_Entry]:
    at = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            head = _check(line, path, at)
            yield _Entry(float(head[3]), path.name, at, len(line), json.loads(head[4]))
            at += len(line)


def _document(folder: Path, entry: _Entry) -> bytes:
    with open(folder / entry.segment, "rb") as file:
        file.seek(entry.offset)
        line = file.read(entry.length)
    return line[_check(line, folder / entry.segment, entry.offset).end() : -2]


def _check(line: bytes, path: Path, offset: int) -> re.Match[bytes]:
    head = _HEAD.match(line)
    if head is None or zlib.crc32(memoryview(line)[_CHECKED_FROM:-1]) != int(head[1], 16):
        raise StorageError(
            f"{path} is damaged at byte {offset}: the checksum of the record there is wrong; "
            "restore the file from a backup, or delete that line to give up the one record"
        )
    return head
