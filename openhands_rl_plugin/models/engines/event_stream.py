"""Server-sent events, parsed from bytes as they arrive."""

from __future__ import annotations

from typing import NamedTuple


class ServerEvent(NamedTuple):
    """One event: all of its bytes, up to and including the empty line, and its name and data.

    Both are empty for a comment.
    """

    raw: bytes
    name: bytes
    data: bytes


class EventStreamReader:
    """Splits a stream into events, wherever the network cuts it.

    Only line feeds end lines: JSON text may contain other characters that ``splitlines`` would split at.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._line = 0
        self._searched = 0
        self._fields: dict[bytes, list[bytes]] = {}

    def feed(self, data: bytes) -> list[ServerEvent]:
        """The events that ``data`` completes."""
        found: list[ServerEvent] = []
        self._buffer += data
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            line = bytes(self._buffer[self._line : end]).rstrip(b"\r")
            self._line = self._searched = end + 1
            if line:
                name, _, value = line.partition(b":")
                self._fields.setdefault(name, []).append(value.removeprefix(b" "))
            else:
                found.append(self._take())
        self._searched = len(self._buffer)
        return found

    def rest(self) -> bytes:
        """The bytes of an event that is not complete."""
        return bytes(self._buffer)

    def _take(self) -> ServerEvent:
        raw = bytes(self._buffer[: self._line])
        del self._buffer[: self._line]
        fields, self._fields = self._fields, {}
        self._line = self._searched = 0
        return ServerEvent(raw, b"".join(fields.get(b"event", ())[-1:]), b"\n".join(fields.get(b"data", ())))
