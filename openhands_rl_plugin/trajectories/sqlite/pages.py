"""The records of a SQLite file, read page by page, so that a damaged page costs no more than what stands on it.

SQLite itself reads a table from its root downwards and gives up at the first page that makes no sense. Here every page
is looked at by itself: neither the file's header nor the pages above are needed. https://www.sqlite.org/fileformat2.html
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.trajectories.sqlite.write_ahead_log import read_log

USUAL_PAGE_BYTES = 2048
_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR = 0x0D, 0x0A, 0x02
_LARGEST_PAYLOAD = 2**30
_DEEPEST = 40  # SQLite itself goes no deeper than 20
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}

Value = int | float | str | bytes | None


class PageRecord(NamedTuple):
    """One cell. ``rowid`` is 0 for the cells of an index (and of a table without row ids)."""

    page: int
    indexed: bool
    rowid: int
    values: tuple[Value, ...]


class SqlitePages:
    """The pages of ``trajectories.sqlite`` and of its write-ahead log, numbered from 1, as they were last committed.

    ``log_damage`` says what is wrong with the log, ``None`` when nothing is.
    """

    def __init__(self, file: Path, size: int | None = None) -> None:
        self._file = file.open("rb")
        self._bytes = file.stat().st_size
        self.size = size or _page_size(self._file.read(100), self._bytes)
        log = file.with_name(f"{file.name}-wal")
        read = read_log(log.read_bytes() if log.exists() else b"", self.size)
        self._log = {number: page for number, page in read.pages.items() if 0 < number < 2**31}
        self.log_damage = read.damage
        self.count = max([self._bytes // self.size, *self._log])
        self.free = self._free_pages()

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def records(self) -> Iterator[PageRecord]:
        """Every cell of every page that is in use and that is a leaf, or part of an index. What makes no sense is left
        out: who knows what should be there misses it."""
        for number in range(1, self.count + 1):
            if number not in self.free:
                yield from self.cells(number)

    def index(self, root: int) -> Iterator[PageRecord | None]:
        """The cells of the index whose root is that page, in order; ``None`` stands for what could not be read."""
        yield from self._subtree(root, set(), 1)

    def _subtree(self, number: int, visited: set[int], depth: int) -> Iterator[PageRecord | None]:
        page, start = self.page(number), 100 if number == 1 else 0
        # A page occurs once in a tree: pointers that lead to it again are damaged.
        known = number in visited or depth > _DEEPEST
        if known or len(page) < self.size or page[start] not in (_INDEX_LEAF, _INDEX_INTERIOR):
            yield None
            return
        visited.add(number)
        cells, interior = _number(page, start + 3, 2), page[start] == _INDEX_INTERIOR
        for at in range(min(cells, self.size // 2)):
            pointer = _number(page, start + (12 if interior else 8) + 2 * at, 2)
            if interior:
                yield from self._subtree(_number(page, pointer, 4), visited, depth + 1)
            yield self._cell_at(number, page, pointer)
        if interior:
            yield from self._subtree(_number(page, start + 8, 4), visited, depth + 1)

    def page(self, number: int) -> bytes:
        """The bytes of a page; fewer, or none, when the file has no such page."""
        if number in self._log:
            return self._log[number]
        if not 1 <= number <= self.count:
            return b""
        self._file.seek((number - 1) * self.size)
        return self._file.read(self.size)

    def cells(self, number: int) -> Iterator[PageRecord]:
        """The cells of one page."""
        page, start = self.page(number), 100 if number == 1 else 0
        if len(page) < self.size or page[start] not in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR):
            return
        first = start + (12 if page[start] == _INDEX_INTERIOR else 8)
        for at in range(min(_number(page, start + 3, 2), (self.size - first) // 2)):
            if (cell := self._cell_at(number, page, _number(page, first + 2 * at, 2))) is not None:
                yield cell

    def _cell_at(self, number: int, page: bytes, pointer: int) -> PageRecord | None:
        kind = page[100 if number == 1 else 0]
        with suppress(ValueError, IndexError, OverflowError, struct.error):
            return self._cell(number, page, kind, pointer + (4 if kind == _INDEX_INTERIOR else 0))
        return None

    def _cell(self, number: int, page: bytes, kind: int, at: int) -> PageRecord:
        length, at = _varint(page, at)
        rowid = 0
        if kind == _TABLE_LEAF:
            rowid, at = _varint(page, at)
        if not 0 < length <= min(_LARGEST_PAYLOAD, self.size * (self.count + 1)):
            raise ValueError("a cell is longer than the file")
        payload = self._payload(page, at, length, self._local(length, kind))
        return PageRecord(number, kind != _TABLE_LEAF, rowid, _values(payload))

    def _local(self, length: int, kind: int) -> int:
        """How much of a payload stands on the page itself."""
        most = self.size - 35 if kind == _TABLE_LEAF else (self.size - 12) * 64 // 255 - 23
        if length <= most:
            return length
        least = (self.size - 12) * 32 // 255 - 23
        fitting = least + (length - least) % (self.size - 4)
        return fitting if fitting <= most else least

    def _payload(self, page: bytes, at: int, length: int, local: int) -> bytes:
        parts, left = [page[at : at + local]], length - local
        following = _number(page, at + local, 4) if left else 0
        while left > 0:
            more = self.page(following)
            if len(more) < self.size:
                raise ValueError("a page is missing")
            parts.append(more[4 : 4 + left])
            left -= len(parts[-1])
            following = _number(more, 0, 4)
        payload = b"".join(parts)
        if len(payload) != length:
            raise ValueError("a cell is cut off")
        return payload

    def _free_pages(self) -> frozenset[int]:
        """The pages on the free list, whose old cells are no records any more; as far as it can be followed."""
        free: set[int] = set()
        header = self.page(1)
        trunk = _number(header, 32, 4) if len(header) >= 100 else 0
        while 1 < trunk <= self.count and trunk not in free:
            page = self.page(trunk)
            if len(page) < self.size:
                break
            leaves = [_number(page, 8 + 4 * at, 4) for at in range(min(_number(page, 4, 4), self.size // 4 - 2))]
            # A number that is no page says that this is no page of the list either.
            if any(not 1 < each <= self.count for each in leaves):
                break
            free |= {trunk, *leaves}
            trunk = _number(page, 0, 4)
        return frozenset(free)


def _page_size(header: bytes, length: int) -> int:
    size = _number(header, 16, 2) if len(header) >= 18 else 0
    size = 65536 if size == 1 else size
    valid = 512 <= size <= 65536 and size & (size - 1) == 0 and length % size == 0
    return size if valid else USUAL_PAGE_BYTES


def _values(payload: bytes) -> tuple[Value, ...]:
    end, at = _varint(payload, 0)
    if not at <= end <= len(payload):
        raise ValueError("a record's header is longer than the record")
    kinds: list[int] = []
    while at < end:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    values: list[Value] = []
    for kind in kinds:
        value, end = _value(payload, kind, end)
        values.append(value)
    if end != len(payload):
        raise ValueError("a record has another length than its header says")
    return tuple(values)


def _value(payload: bytes, kind: int, at: int) -> tuple[Value, int]:
    if kind == 0:
        return None, at
    if kind in (8, 9):
        return kind - 8, at
    if kind in _INTEGER_BYTES:
        end = at + _INTEGER_BYTES[kind]
        return int.from_bytes(payload[at:end], "big", signed=True), end
    if kind == 7:
        return struct.unpack(">d", payload[at : at + 8])[0], at + 8
    if kind < 12:
        raise ValueError("a value is of an unknown kind")
    end = at + (kind - 12) // 2
    return (payload[at:end] if kind % 2 == 0 else payload[at:end].decode()), end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = used = 0
    while used < 9:
        byte = data[at + used]
        used += 1
        if used == 9:
            value = value << 8 | byte
        else:
            value = value << 7 | byte & 0x7F
            if not byte & 0x80:
                break
    return value - 2**64 if value >= 2**63 else value, at + used


def _number(data: bytes, at: int, width: int) -> int:
    return int.from_bytes(data[at : at + width], "big")
