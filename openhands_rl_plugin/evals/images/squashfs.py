"""Reads squashfs file systems of strangers: the members of a tree as an archive has them, one after the other.

Source: "Squashfs Binary Format" (version 4.0, little endian) and Linux' ``fs/squashfs/squashfs_fs.h``. What a field
says of a size, a place or a number is believed only within the file and the format's own bounds; nothing is read into
memory as a whole but one block (at most 1 MiB). Extended attributes are left out.
"""

from __future__ import annotations

import lzma
import os
import struct
import tarfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

from openhands_rl_plugin.core.errors import BadEnvironmentError

MAGIC = b"hsqs"
_SUPERBLOCK = struct.Struct("<4sIIIIHHHHHHQQQQQQQQ")
_COMPRESSORS = {1: "gzip", 2: "lzma", 3: "lzo", 4: "xz", 5: "lz4", 6: "zstd"}
_METADATA = 8192
_NO_FRAGMENT = 0xFFFFFFFF
_STORED_BLOCK = 1 << 24
_MOST_OF_A_LINK = 65_535
_DEEPEST = 250
_OF_FILES = {2: "<IIII", 9: "<QQQIIII"}
_OF_FOLDERS = {1: "<IIHHI", 8: "<IIIIHHI"}
_KINDS = {3: tarfile.SYMTYPE, 4: tarfile.BLKTYPE, 5: tarfile.CHRTYPE, 6: tarfile.FIFOTYPE, 7: tarfile.FIFOTYPE}
"""Of the basic inodes; those with attributes have seven more."""


class _Superblock(NamedTuple):
    magic: bytes
    inodes: int
    time: int
    block: int
    fragments: int
    compressor: int
    block_log: int
    flags: int
    ids: int
    major: int
    minor: int
    root: int
    used: int
    id_table: int
    xattr_table: int
    inode_table: int
    folder_table: int
    fragment_table: int
    export_table: int


class _File(NamedTuple):
    """Where a file's content is: its first block, its size, its end in a fragment, and where the blocks' sizes are."""

    start: int
    size: int
    fragment: int
    offset: int
    sizes: _Metadata


class SquashReader:
    """The tree in ``file``, which can go back and forth. ``what`` names it in errors.

    Raises ``BadEnvironmentError`` for a damaged or hostile one, or one that cannot be uncompressed, ``OSError``.
    """

    def __init__(self, file: IO[bytes], what: str) -> None:
        self._file, self._what = file, what
        self._length = file.seek(0, os.SEEK_END)
        self._super = self._superblock()
        self._unpack = self._decompressor()
        self._metadata: _Recent[tuple[bytes, int]] = _Recent(256)
        self._fragments: _Recent[bytes] = _Recent(8)
        self._current: _File | None = None
        self._links: dict[int, str] = {}
        self._folders: set[int] = set()

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """The root, and everything below it; a folder before what is in it, a hard link after its file."""
        pending = [iter([("", self._super.root)])]
        while pending:
            found = next(pending[-1], None)
            if found is None:
                pending.pop()
                continue
            path, place = found
            inode = self._at(self._super.inode_table, place)
            kind, mode, _, _, mtime, _ = inode.fields("<HHHHII")
            info = tarfile.TarInfo(path or ".")
            info.mode, info.mtime = mode, mtime
            if kind in _OF_FOLDERS:
                if len(pending) > _DEEPEST or place in self._folders:
                    raise self.damaged("a folder is in itself, or too deep")
                self._folders.add(place)
                info.type = tarfile.DIRTYPE
                yield info
                pending.append(self._entries(path, kind, inode))
            else:
                self._describe(info, kind, inode, place)
                yield info

    def content(self, member: tarfile.TarInfo) -> Iterator[bytes]:
        """The content of the member that was given last, in parts."""
        assert self._current is not None and member.isreg()
        file, block = self._current, self._super.block
        place, left = file.start, file.size
        while left >= block or (left and file.fragment == _NO_FRAGMENT):
            (size,) = file.sizes.fields("<I")
            part = bytes(min(block, left)) if not size else self._block(place, size)
            if len(part) != min(block, left):
                raise self.damaged("a block has another length than its file says")
            place += size & ~_STORED_BLOCK
            left -= len(part)
            yield part
        if left:
            part = self._fragment(file.fragment)[file.offset : file.offset + left]
            if len(part) != left:
                raise self.damaged("the end of a file is not in its fragment")
            yield part

    def damaged(self, why: str) -> BadEnvironmentError:
        """The error of a file that contradicts itself."""
        return BadEnvironmentError(f"{self._what} is no squashfs that can be read: {why}")

    def bytes_at(self, place: int, size: int) -> bytes:
        """So many bytes of the file, from ``place`` on."""
        if place < 0 or size < 0 or place + size > self._length:
            raise self.damaged("it is cut, or says that something lies outside of it")
        self._file.seek(place)
        data = b""
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        if len(data) != size:
            raise self.damaged("it is cut")
        return data

    def metadata(self, place: int) -> tuple[bytes, int]:
        """The block of metadata at ``place``, and where the next one is."""
        if (known := self._metadata.get(place)) is not None:
            return known
        (head,) = struct.unpack("<H", self.bytes_at(place, 2))
        size = head & 0x7FFF
        if not 0 < size <= _METADATA:
            raise self.damaged("a block of metadata has an impossible size")
        data = self.bytes_at(place + 2, size)
        if not head & 0x8000:
            data = self._unpacked(data, _METADATA)
        return self._metadata.keep(place, (data, place + 2 + size))

    def _superblock(self) -> _Superblock:
        found = _Superblock(*_SUPERBLOCK.unpack(self.bytes_at(0, _SUPERBLOCK.size)))
        if found.magic != MAGIC or (found.major, found.minor) != (4, 0):
            raise self.damaged("it is not of version 4.0")
        if not 12 <= found.block_log <= 20 or found.block != 1 << found.block_log:
            raise self.damaged("its blocks have an impossible size")
        return found

    def _decompressor(self) -> Callable[[bytes, int], bytes]:
        name = _COMPRESSORS.get(self._super.compressor, f"number {self._super.compressor}")
        unpack = {"gzip": _of_zlib, "xz": _of_xz, "zstd": _of_zstd}.get(name)
        if unpack is None:
            raise BadEnvironmentError(
                f"{self._what} is compressed by {name}, which cannot be read here; gzip, xz and zstd can "
                "(mksquashfs -comp)"
            )
        return unpack

    def _unpacked(self, data: bytes, most: int) -> bytes:
        try:
            plain = self._unpack(data, most + 1)
        except (zlib.error, lzma.LZMAError, EOFError, *_zstd_errors()) as error:
            raise self.damaged(str(error)) from error
        if len(plain) > most:
            raise self.damaged("a block is larger than it may be")
        return plain

    def _block(self, place: int, size: int) -> bytes:
        stored = size & ~_STORED_BLOCK
        if stored > self._super.block:
            raise self.damaged("a block is larger than it may be")
        data = self.bytes_at(place, stored)
        return data if size & _STORED_BLOCK else self._unpacked(data, self._super.block)

    def _fragment(self, number: int) -> bytes:
        if (known := self._fragments.get(number)) is not None:
            return known
        if number >= self._super.fragments:
            raise self.damaged("a fragment is not in its table")
        # The table is in blocks of metadata of 512 entries, whose places are listed.
        (place,) = struct.unpack("<Q", self.bytes_at(self._super.fragment_table + number // 512 * 8, 8))
        start, size, _ = _Metadata(self, place, number % 512 * 16).fields("<QII")
        return self._fragments.keep(number, self._block(start, size))

    def _at(self, table: int, reference: int) -> _Metadata:
        return _Metadata(self, table + (reference >> 16), reference & 0xFFFF)

    def _entries(self, path: str, kind: int, inode: _Metadata) -> Iterator[tuple[str, int]]:
        """The paths in a folder, and the places of their inodes."""
        if kind == 1:
            block, _, size, offset, _ = inode.fields(_OF_FOLDERS[kind])
        else:
            _, size, block, _, _, offset, _ = inode.fields(_OF_FOLDERS[kind])
        left = size - 3
        if left <= 0:
            return
        listing = self._at(self._super.folder_table, block << 16 | offset)
        while left > 0:
            count, start, _ = listing.fields("<III")
            left -= 12
            if count >= 256:
                raise self.damaged("a folder has an impossible number of entries")
            for _ in range(count + 1):
                offset, _, _, length = listing.fields("<HhHH")
                name = listing.read(length + 1)
                left -= 8 + len(name)
                if name in (b".", b"..") or b"/" in name or b"\0" in name or left < 0:
                    raise self.damaged("a folder has a name that is none")
                yield f"{path}/{os.fsdecode(name)}", start << 16 | offset

    def _describe(self, info: tarfile.TarInfo, kind: int, inode: _Metadata, place: int) -> None:
        """What is no folder."""
        basic = kind if kind <= 7 else kind - 7
        if kind in _OF_FILES:
            links = self._regular(info, kind, inode)
        elif basic == 3:
            links, size = inode.fields("<II")
            if size > _MOST_OF_A_LINK:
                raise self.damaged("a link is longer than a path may be")
            info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(inode.read(size))
        elif basic in _KINDS:
            links, info.type = 1, _KINDS[basic]
        else:
            raise self.damaged("an entry is of an unknown kind")
        first = self._links.setdefault(place, info.name) if links > 1 else info.name
        if first != info.name:
            info.type, info.linkname, info.size = tarfile.LNKTYPE, first, 0

    def _regular(self, info: tarfile.TarInfo, kind: int, inode: _Metadata) -> int:
        if kind == 2:
            start, fragment, offset, size = inode.fields(_OF_FILES[kind])
            links = 1
        else:
            start, size, _, links, fragment, offset, _ = inode.fields(_OF_FILES[kind])
        self._current = _File(start, size, fragment, offset, inode)
        info.type, info.size = tarfile.REGTYPE, size
        return links


class _Metadata:
    """A place in the metadata, from which is read over the ends of its blocks."""

    def __init__(self, reader: SquashReader, block: int, offset: int) -> None:
        self._reader, self._next, self._offset = reader, block, offset
        self._data = b""
        self._advance()
        if offset >= len(self._data):
            raise reader.damaged("a reference leads to no metadata")

    def read(self, size: int) -> bytes:
        """So many bytes, which are few."""
        data = b""
        while len(data) < size:
            if self._offset >= len(self._data):
                self._advance()
                self._offset = 0
            part = self._data[self._offset : self._offset + size - len(data)]
            self._offset += len(part)
            data += part
        return data

    def fields(self, form: str) -> tuple[int, ...]:
        """Numbers of that form."""
        return struct.unpack(form, self.read(struct.calcsize(form)))

    def _advance(self) -> None:
        self._data, self._next = self._reader.metadata(self._next)


class _Recent[T]:
    """The values that were asked for last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[int, T] = OrderedDict()

    def get(self, key: int) -> T | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: int, value: T) -> T:
        self._kept[key] = value
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return value


def _of_zlib(data: bytes, most: int) -> bytes:
    return zlib.decompressobj().decompress(data, most)


def _of_xz(data: bytes, most: int) -> bytes:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=64 * 2**20).decompress(data, most)


def _of_zstd(data: bytes, most: int) -> bytes:
    from backports import zstd

    return zstd.ZstdDecompressor().decompress(data, most)


def _zstd_errors() -> tuple[type[Exception], ...]:
    from backports import zstd

    return (zstd.ZstdError,)
