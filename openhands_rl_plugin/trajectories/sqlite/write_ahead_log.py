"""The committed pages of a write-ahead log, proven by its checksums. https://sqlite.org/walformat.html

Each checksum goes on from the one before, and the first from that of the header, which covers the salts. So the chain
alone proves a frame: what an older log left behind the newest frames never continues it.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import NamedTuple

_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
_MAGIC = {b"\x37\x7f\x06\x82": "<", b"\x37\x7f\x06\x83": ">"}

Checksum = tuple[int, int]


class _Frame(NamedTuple):
    number: int
    commits: bool
    salts: bytes
    checksum: Checksum
    covered: bytes
    page: bytes


class WriteAheadLog(NamedTuple):
    """``pages``: by number, as of the last commit up to which everything is proven.

    ``lost``: frames behind it that were committed, and cannot be trusted. ``unseen``: frames that are proven, and that
    SQLite does not read, because the salts beside them, or the log's header, are damaged.
    """

    pages: dict[int, bytes]
    lost: int = 0
    unseen: int = 0

    @property
    def damage(self) -> str | None:
        """What is wrong, in words."""
        if self.lost:
            return f"{self.lost} pages of the write-ahead log cannot be trusted; what was written with them is left out"
        if self.unseen:
            return f"it is damaged; its last {self.unseen} pages are sound and were read, but SQLite ignores them"
        return None


def read_log(log: bytes, size: int) -> WriteAheadLog:
    """Read a log of pages of ``size`` bytes."""
    frames = _frames(log, size)
    if not frames:
        return WriteAheadLog({})
    header = log[:_HEADER_BYTES]
    order, checksum, sound = _start(header, frames[0])
    pages: dict[int, bytes] = {}
    waiting: dict[int, bytes] = {}
    proven = committed = 0
    for frame in frames:
        checksum = _checksum(order, checksum, frame.covered)
        if checksum != frame.checksum:
            break
        proven += 1
        waiting[frame.number] = frame.page
        if frame.commits:
            pages |= waiting
            waiting, committed = {}, proven
    salts = header[16:24] if sound else _usual_salts(frames[:proven] or frames)
    seen = next((at for at in range(committed) if frames[at].salts != salts), committed) if sound else 0
    return WriteAheadLog(pages, lost=_lost(frames[proven:], salts), unseen=committed - seen)


def _frames(log: bytes, size: int) -> list[_Frame]:
    step = _FRAME_HEADER_BYTES + size
    frames: list[_Frame] = []
    for at in range(_HEADER_BYTES, len(log) - step + 1, step):
        number, pages, salts, *checksum = struct.unpack_from(">II8sII", log, at)
        page = log[at + _FRAME_HEADER_BYTES : at + step]
        frames.append(_Frame(number, pages > 0, salts, (checksum[0], checksum[1]), log[at : at + 8] + page, page))
    return frames


def _start(header: bytes, first: _Frame) -> tuple[str, Checksum, bool]:
    """Byte order and checksum with which the chain begins, and whether the header is sound."""
    stored: Checksum = struct.unpack(">II", header[24:32])
    usual = _MAGIC.get(header[:4], "<")
    if header[:4] in _MAGIC and _checksum(usual, (0, 0), header[:24]) == stored:
        return usual, stored, True
    for order in _MAGIC.values():
        for begin in (stored, _checksum(order, (0, 0), header[:24])):
            if _checksum(order, begin, first.covered) == first.checksum:
                return order, begin, False
    return usual, stored, False


def _lost(behind: list[_Frame], salts: bytes) -> int:
    """Frames of this log behind the proven ones, if one of them was committed. Those of a transaction that was rolled
    back stay there too, and so do those of an older log, with other salts."""
    own = [at for at, frame in enumerate(behind) if frame.salts == salts]
    return own[-1] + 1 if any(behind[at].commits for at in own) else 0


def _usual_salts(frames: list[_Frame]) -> bytes:
    return Counter(frame.salts for frame in frames).most_common(1)[0][0]


def _checksum(order: str, begin: Checksum, data: bytes) -> Checksum:
    one, two = begin
    for even, odd in struct.iter_unpack(f"{order}II", data):
        one = one + even + two & 0xFFFFFFFF
        two = two + odd + one & 0xFFFFFFFF
    return one, two
