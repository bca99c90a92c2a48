"""``.sif`` files made by tests: a squashfs of the members of ``made_images``, and the container around it.

``sifs/*.sif`` are of the real tools (Debian's squashfs-tools 4.5.1 and siftool 2.8.3), by ``python made_sif.py``.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from made_images import Member

SIFS = Path(__file__).parent / "sifs"
BLOCK = 4096
SETTINGS = {"Env": ["PATH=/usr/bin:/bin", "A=1"], "WorkingDir": "/usr", "User": "worker", "Cmd": ["/bin/sh"]}
LOOP = b"a folder that is its own parent"
"""The content of a folder that leads back to the one that it is in."""


@dataclass
class _Folder:
    mode: int = 0o755
    entries: dict[str, Member | _Folder] = field(default_factory=dict)


@dataclass
class _Writer:
    data: bytearray = field(default_factory=lambda: bytearray(96))
    inodes: bytearray = field(default_factory=bytearray)
    listings: bytearray = field(default_factory=bytearray)
    number: int = 0

    def folder(self, folder: _Folder) -> int:
        """Writes it; the place of its inode."""
        found = []
        for name, each in sorted(folder.entries.items()):
            if isinstance(each, Member) and each.content == LOOP:
                found.append((name, None, 1))
            elif isinstance(each, _Folder):
                found.append((name, self.folder(each), 1))
            else:
                found.append((name, self.other(each), _KINDS[each.kind]))
        own, start = _place(len(self.inodes)), len(self.listings)
        for name, place, kind in found:
            place = own if place is None else place
            self.listings += struct.pack("<III", 0, place >> 16, 1)
            self.listings += struct.pack("<HhHH", place & 0xFFFF, 0, kind, len(os.fsencode(name)) - 1)
            self.listings += os.fsencode(name)
        block, offset = divmod(_place(start), 1 << 16)
        size = len(self.listings) - start + 3
        self.inode(8, folder.mode, struct.pack("<IIIIHHI", 2, size, block, 0, 0, offset, 0xFFFFFFFF))
        return own

    def other(self, member: Member) -> int:
        own = _place(len(self.inodes))
        if member.kind == tarfile.SYMTYPE:
            self.inode(3, 0o777, struct.pack("<II", 1, len(member.link)) + member.link.encode())
        elif member.kind == tarfile.REGTYPE:
            start = len(self.data)
            parts = [member.content[at : at + BLOCK] for at in range(0, len(member.content), BLOCK)]
            sizes = b"".join(struct.pack("<I", self.block(part)) for part in parts)
            head = struct.pack("<QQQIIII", start, len(member.content), 0, 1, 0xFFFFFFFF, 0, 0xFFFFFFFF)
            self.inode(9, member.mode, head + sizes)
        else:
            self.inode(_KINDS[member.kind], member.mode, struct.pack("<II", 1, 0x103))
        return own

    def block(self, part: bytes) -> int:
        packed = zlib.compress(part, 1)
        self.data += packed if len(packed) < len(part) else part
        return len(packed) if len(packed) < len(part) else len(part) | 1 << 24

    def inode(self, kind: int, mode: int, rest: bytes) -> None:
        self.number += 1
        self.inodes += struct.pack("<HHHHII", kind, mode, 0, 0, 1_700_000_000, self.number) + rest


_KINDS = {tarfile.REGTYPE: 2, tarfile.SYMTYPE: 3, tarfile.BLKTYPE: 4, tarfile.CHRTYPE: 5, tarfile.FIFOTYPE: 6}


def squashfs(members: Sequence[Member]) -> bytes:
    """A squashfs of members, whose folders are made as they come."""
    root, writer = _Folder(), _Writer()
    for member in members:
        *folders, name = member.name.strip("/").split("/")
        place = root
        for each in folders:
            deeper = place.entries.setdefault(each, _Folder())
            assert isinstance(deeper, _Folder)
            place = deeper
        if member.kind == tarfile.DIRTYPE and member.content != LOOP:
            place.entries.setdefault(name, _Folder(member.mode))
        else:
            place.entries[name] = member
    at_root = writer.folder(root)
    out = writer.data
    places = []
    for table in (writer.inodes, writer.listings, struct.pack("<I", 0)):
        places.append(len(out))
        for start in range(0, len(table), 8192):
            part = table[start : start + 8192]
            out += struct.pack("<H", len(part) | 0x8000) + part
    ids = len(out)
    out += struct.pack("<Q", places[2])
    none = 2**64 - 1
    numbers = (*(0, BLOCK, 0, 1, 12, 0x0200, 1, 4, 0), *(at_root, len(out), ids, none, places[0], places[1], ids, none))
    out[:96] = struct.pack("<4sIIIIHHHHHHQQQQQQQQ", b"hsqs", writer.number, *numbers)
    return bytes(out) + bytes(-len(out) % 4096)


def unpacked(layer: bytes) -> list[Member]:
    """The members of a layer that has no hard links."""
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        return [
            Member(each.name, _content(archive, each), each.type, each.linkname, each.mode)
            for each in archive.getmembers()
            if each.name.strip("./")
        ]


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member) if member.isreg() else None
    return file.read() if file is not None else b""


def _place(position: int) -> int:
    """Of what stands there in a table, as inodes are referred to."""
    return position // 8192 * 8194 << 16 | position % 8192


@dataclass
class Described:
    """An object in the container. ``offset`` and ``size`` are those of ``data``, unless they lie."""

    data: bytes
    kind: int = 0x4004
    name: str = ""
    extra: bytes = struct.pack("<ii3s", 1, 2, b"02\0")
    offset: int | None = None
    size: int | None = None


def settings(text: bytes | None = None) -> Described:
    return Described(text if text is not None else json.dumps(SETTINGS).encode(), 0x4006, "oci-config.json", b"")


def sif(*objects: Described, total: int = 48, offset: int = 4096, version: bytes = b"01\0") -> bytes:
    """The container."""
    at, table, data = 4096 + 48 * 585, b"", b""
    for number, each in enumerate(objects, 1):
        place = at + len(data) if each.offset is None else each.offset
        size = len(each.data) if each.size is None else each.size
        numbers = (number, 0xF0000000, 0, place, size, size, 0, 0, 0, 0)
        table += struct.pack("<i?IIIqqqqqqq128s384s", each.kind, True, *numbers, each.name.encode(), each.extra)
        data += each.data
    numbers = (0, 0, 48 - len(objects), total, offset, 48 * 585, at, len(data))
    head = struct.pack(
        "<32s10s3s3s16s8q", b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC\0", version, b"02\0", b"", *numbers
    )
    return head.ljust(4096, b"\0") + table.ljust(48 * 585, b"\0") + data


def _by_real_tools() -> None:
    """As root, because of the device."""
    SIFS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        tree, partition = Path(name, "tree"), Path(name, "partition")
        (tree / "usr/many").mkdir(parents=True)
        (tree / "etc").mkdir()
        for number in range(300):
            (tree / f"usr/many/{number}").write_text(f"file {number}\n")
        for file, content in REAL.items():
            (tree / file).write_bytes(content)
        os.link(tree / "usr/words", tree / "usr/same")
        (tree / "usr/link").symlink_to("../etc/passwd")
        (tree / "out").symlink_to("/etc/shadow")
        (tree / "usr/rights").write_text("#!/bin/sh\n")
        (tree / "usr/rights").chmod(0o6755)
        os.mknod(tree / "null", 0o20666, os.makedev(1, 3))
        os.mkfifo(tree / "pipe")
        Path(name, "oci-config.json").write_text(json.dumps(SETTINGS))
        for kind in ("gzip", "xz", "zstd", "lz4"):
            made = str(SIFS / f"{kind}.sif")
            Path(made).unlink(missing_ok=True)
            words = ["-comp", kind, "-b", str(BLOCK), "-noappend", "-quiet", "-all-time", "1700000000"]
            subprocess.run(["mksquashfs", tree, partition, *words], check=True, stdout=subprocess.DEVNULL)
            subprocess.run(["siftool", "new", made], check=True)
            subprocess.run(["siftool", "add", made, Path(name, "oci-config.json"), *_JSON], check=True)
            subprocess.run(["siftool", "add", made, partition, *_PARTITION], check=True)
            os.chmod(made, 0o644)


_JSON = ("--datatype", "6", "--filename", "oci-config.json")
_PARTITION = ("--datatype", "4", "--parttype", "2", "--partfs", "1", "--partarch", "2")
REAL = {
    "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nworker:x:1234:99::/home/worker:/bin/sh\n",
    "usr/random": b"".join(hashlib.sha256(bytes([n])).digest() for n in range(200)),
    "usr/words": b"".join(b"word %d\n" % n for n in range(2000)),
    "usr/zeros": bytes(3 * BLOCK + 5),
    "usr/empty": b"",
    "usr/n\u00e4me": b"a name that is not ASCII\n",
}
"""Files in the images of the real tools."""

if __name__ == "__main__":
    assert shutil.which("siftool") and shutil.which("mksquashfs"), "apt-get install siftool squashfs-tools"
    sys.exit(_by_real_tools())
