"""Token notes on the disk: what training computed for each trained token, beside the metrics of a run.

``RUN/notes/000001.notes`` is one training (of rank 0; ``-r1`` and so on are those of other ranks): frames that are only
appended, each a JSON header and a compressed body, with a checksum. The first frame describes the training, each other
one has the tokens of one sample in one optimiser step. What a killed process has left half is not read.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pydantic import ValidationError

from openhands_rl_plugin.core.files import PRIVATE
from openhands_rl_plugin.core.types import Frozen

NOTES_FOLDER = "notes"
NOTE_STEP = 2.0**-17
"""Numbers are kept as multiples of this: off by at most 3.9e-6, where float16 is off by 4e-3 at a logprob of -8."""
MOST_FILE_BYTES = 2**30
MOST_FOLDER_BYTES = 4 * 2**30

_LEAST, _GREATEST, _UNKNOWN = -(2**31) + 1, 2**31 - 1, -(2**31)
_LENGTHS = struct.Struct("<III")
_LONGEST_HEADER, _LONGEST_BODY = 2**20, 2**28
_NAME = re.compile(r"(\d{6})(?:-r\d+)?\.notes")


class NotedTraining(Frozen):
    """A training. ``fingerprint``: of all that its result depends on; ``version``: that it started from."""

    fingerprint: str
    algorithm: str
    version: int
    epochs: int
    at: float


class NotedSample(Frozen):
    """Which tokens a frame has. ``nodes``: pairs of a node and the number of its sampled tokens, in order; ``columns``:
    the names of the numbers that are known of each; ``step`` and ``epoch`` count from 1."""

    step: int
    epoch: int
    episode: str
    nodes: tuple[tuple[int, int], ...]
    columns: tuple[str, ...]


class Frame(NamedTuple):
    """A header that was read, where its frame begins and ends, and where its body lies."""

    header: bytes
    begins: int
    body: int
    ends: int
    checksum: int


def frame_bytes(header: Frozen, columns: Sequence[Sequence[float]] = ()) -> bytes:
    """A frame as it is appended."""
    said = header.model_dump_json().encode()
    body = zlib.compress(b"".join(map(_planes, columns)), 1) if columns else b""
    return _LENGTHS.pack(len(said), len(body), zlib.crc32(body, zlib.crc32(said))) + said + body


def frames(file: BinaryIO, start: int = 0) -> Iterator[Frame]:
    """The whole frames from byte ``start`` on, without their bodies."""
    size, at = file.seek(0, os.SEEK_END), start
    while at + _LENGTHS.size <= size:
        file.seek(at)
        header, body, checksum = _LENGTHS.unpack(file.read(_LENGTHS.size))
        begins = at + _LENGTHS.size + header
        if header > _LONGEST_HEADER or body > _LONGEST_BODY or begins + body > size:
            return
        yield Frame(file.read(header), at, begins, begins + body, checksum)
        at = begins + body


def training_of(file: BinaryIO) -> NotedTraining | None:
    """What the file is about; ``None`` where that cannot be read."""
    first = next(frames(file), None)
    with suppress(ValidationError):
        return None if first is None else NotedTraining.model_validate_json(first.header)
    return None


def numbers_of(file: BinaryIO, frame: Frame) -> tuple[NotedSample, Mapping[str, list[float | None]]] | None:
    """The numbers of a frame, by column; ``None`` for a damaged one."""
    try:
        about = NotedSample.model_validate_json(frame.header)
        file.seek(frame.body)
        packed = file.read(frame.ends - frame.body)
        size = 4 * sum(count for _, count in about.nodes)
        if zlib.crc32(packed, zlib.crc32(frame.header)) != frame.checksum:
            return None
        unpacker = zlib.decompressobj()
        planes = unpacker.decompress(packed, size * len(about.columns) + 1)
    except (ValidationError, zlib.error):
        return None
    if len(planes) != size * len(about.columns):
        return None
    parts = (planes[at * size : (at + 1) * size] for at in range(len(about.columns)))
    return about, dict(zip(about.columns, map(_numbers, parts), strict=True))


def note_files(folder: Path) -> list[Path]:
    """The files of a ``notes`` folder, the oldest training first."""
    try:
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []


class NoteFile:
    """Appends to the file of one training. Its methods raise ``OSError``.

    ``steps``: how many optimiser steps of the same training are finished, whose notes are kept.
    """

    def __init__(self, folder: Path, about: NotedTraining, steps: int, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = _of_rank(folder, rank)
        number = int(own[-1].name[:6]) if own else 0
        # A killed training is continued, not begun beside what it left.
        known = bool(own) and _fingerprint(own[-1]) == about.fingerprint
        path = own[-1] if known else folder / f"{number + 1:06d}{_suffix(rank)}.notes"
        _make_room(folder, path.name[:6])
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
        self._file = os.fdopen(descriptor, "r+b")
        self._size = _end_of(self._file, steps) if known else 0
        self._file.truncate(self._size)
        self._file.seek(self._size)
        if not self._size:
            self.append(frame_bytes(about))

    def append(self, data: bytes) -> bool:
        """Whether it still fitted."""
        if self._size + len(data) > MOST_FILE_BYTES:
            return False
        self._file.write(data)
        self._file.flush()
        self._size += len(data)
        return True

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def _of_rank(folder: Path, rank: int) -> list[Path]:
    return [path for path in note_files(folder) if path.stem[6:] == _suffix(rank)]


def _suffix(rank: int) -> str:
    return f"-r{rank}" if rank else ""


def _fingerprint(path: Path) -> str | None:
    with path.open("rb") as file:
        about = training_of(file)
    return None if about is None else about.fingerprint


def _make_room(folder: Path, keep: str) -> None:
    """Forget the oldest trainings until the folder holds what it may."""
    found = note_files(folder)
    total = sum(path.stat().st_size for path in found)
    for path in found:
        if total + MOST_FILE_BYTES <= MOST_FOLDER_BYTES:
            return
        if path.name[:6] != keep:
            total -= path.stat().st_size
            path.unlink(missing_ok=True)


def _end_of(file: BinaryIO, steps: int) -> int:
    """Where what comes after that many steps begins."""
    end = 0
    for frame in frames(file):
        if frame.begins:
            with suppress(ValueError):
                said = json.loads(frame.header)
                if said["step"] > steps:
                    return end
        end = frame.ends
    return end


def _planes(values: Sequence[float]) -> bytes:
    """As integers of four bytes, all first bytes before all second ones: the upper ones hardly differ."""
    whole = array("i", map(_whole, values))
    if sys.byteorder == "big":
        whole.byteswap()
    data = whole.tobytes()
    return b"".join(data[at::4] for at in range(4))


def _whole(value: float) -> int:
    if value != value:
        return _UNKNOWN
    return int(max(_LEAST, min(_GREATEST, round(value / NOTE_STEP) if abs(value) < 2**20 else value / NOTE_STEP)))


def _numbers(planes: bytes) -> list[float | None]:
    size = len(planes) // 4
    data = bytearray(len(planes))
    for at in range(4):
        data[at::4] = planes[at * size : (at + 1) * size]
    whole = array("i", bytes(data))
    if sys.byteorder == "big":
        whole.byteswap()
    return [None if each == _UNKNOWN else each * NOTE_STEP for each in whole]
