"""Reads archives of strangers member by member, with bounds on what their headers may take of memory."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO, Any, Protocol

from openhands_rl_plugin.core.errors import BadEnvironmentError

# A name and some extended attributes; what a header says of its own length is read into memory as a whole.
_MOST_OF_HEADERS = 2**20
_BROKEN = (tarfile.TarError, RecursionError, ValueError, OverflowError, EOFError)


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; empty at the end."""
        ...


class _Metered:
    """A stream of which at most ``left`` bytes may be read; ``None``: any."""

    def __init__(self, stream: IO[bytes] | Readable) -> None:
        self._stream = stream
        self.left: int | None = _MOST_OF_HEADERS

    def read(self, size: int = -1) -> bytes:
        if self.left is None:
            return self._stream.read(size)
        if size < 0 or size > self.left:
            raise tarfile.ReadError("its headers are too large")
        data = self._stream.read(size)
        self.left -= len(data)
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        return self._stream.seek(position, whence)  # type: ignore[union-attr]

    def tell(self) -> int:
        return self._stream.tell()  # type: ignore[union-attr]


class TarReader:
    """The members of an uncompressed archive, in order. ``what`` names it in errors.

    ``seekable``: the stream can go back, so that the content of members is passed over without being read.
    """

    def __init__(self, stream: IO[bytes] | Readable, what: str, *, seekable: bool = False) -> None:
        self._metered = _Metered(stream)
        self._what = what
        self._mode = "r:" if seekable else "r|"
        self._archive: tarfile.TarFile | None = None

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        """Raises ``BadEnvironmentError`` for what is no archive, or a damaged one."""
        try:
            archive: Any = tarfile.TarFile.open(fileobj=self._metered, mode=self._mode)  # type: ignore[call-overload]
            self._archive = archive
            while (member := archive.next()) is not None:
                archive.members.clear()  # it keeps them all
                self._metered.left = None
                yield member
                self._metered.left = _MOST_OF_HEADERS
        except _BROKEN as error:
            raise BadEnvironmentError(f"{self._what} is no archive that can be read: {error}") from error

    def content(self, member: tarfile.TarInfo) -> Iterator[bytes]:
        """The content of the member that was given last, in parts. Raises ``BadEnvironmentError`` for a cut archive."""
        assert self._archive is not None
        try:
            file = self._archive.extractfile(member)
            while file is not None and (part := file.read(2**20)):
                yield part
        except _BROKEN as error:
            raise BadEnvironmentError(f"{self._what} is no archive that can be read: {error}") from error
