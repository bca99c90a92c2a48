"""Bounds on connections, below any HTTP library: how many, how long a request may take to arrive, a client to read.

HTTP libraries wait for ever for the rest of a request. A ``Connections`` wraps the protocol that a library makes for
each connection, and hears from its middleware when a request has arrived whole and when it was answered.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

_REFUSED = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
_READ = 16 * 1024
"""Bytes of one connection in one turn of the event loop: of tiny chunks, h11 takes a second for the usual 256 KiB."""
Peer = tuple[str, int]


@dataclass(frozen=True)
class ConnectionLimits:
    """``most``: connections at once. ``request``: seconds from a request's first byte, or from the connection, to its
    last byte. ``idle``: seconds between two requests. ``reading``: seconds in which a client must go on reading.
    ``parsing``: seconds of processor time for the bytes of one request."""

    most: int = 1024
    request: float = 60.0
    idle: float = 75.0
    reading: float = 60.0
    parsing: float = 2.0


class Connections:
    """The connections of one server. For one event loop."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        # Files and connections to others need descriptors too.
        self._most = min(self.limits.most, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 16))
        self._open: dict[Peer, _Bounded] = {}
        self._unasked: dict[_Bounded, None] = {}
        self.refused = 0
        self.late = 0

    def __len__(self) -> int:
        return len(self._open)

    def bounded(self, make: Callable[..., asyncio.Protocol]) -> Callable[..., asyncio.Protocol]:
        """A factory of the same protocols, within the limits."""
        return lambda *args, **options: _Bounded(make(*args, **options), self)

    def arrived(self, peer: Peer | None) -> None:
        """A request of that client is there, to its last byte: from now on the server is the one that takes time."""
        if peer is not None and (connection := self._open.get(peer)) is not None:
            connection.expect_nothing()

    def answered(self, peer: Peer | None) -> None:
        """The response was sent: the client may send another request."""
        if peer is not None and (connection := self._open.get(peer)) is not None:
            connection.expect_request(self.limits.idle, begun=False)

    def admit(self, peer: Peer, connection: _Bounded) -> bool:
        """Whether one more connection has a place. The one that has waited longest without a request gives its up."""
        if len(self._open) >= self._most:
            oldest = next(iter(self._unasked), None)
            if oldest is None:
                self.refused += 1
                return False
            self.late += 1
            oldest.drop()
        self._open[peer] = connection
        return True

    def waits(self, connection: _Bounded, *, unasked: bool) -> None:
        """Note whether a connection has no request under way."""
        self._unasked.pop(connection, None)
        if unasked:
            self._unasked[connection] = None

    def left(self, peer: Peer, connection: _Bounded) -> None:
        """Forget a connection."""
        self._unasked.pop(connection, None)
        if self._open.get(peer) is connection:
            del self._open[peer]


class _Bounded(asyncio.Protocol):
    """Passes everything on to ``inner``, and aborts the connection when it takes too long."""

    def __init__(self, inner: asyncio.Protocol, owner: Connections) -> None:
        self._inner = inner
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._peer: Peer = ("", 0)
        self._admitted = False
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._parsing = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        with suppress(AttributeError):  # other event loops than asyncio's
            setattr(transport, "max_size", _READ)  # noqa: B010
        self._peer = peer_of(transport.get_extra_info("peername"))
        self._admitted = self._owner.admit(self._peer, self)
        if not self._admitted:
            self._transport.write(_REFUSED)
            self._transport.close()
            return
        self.expect_request(self._owner.limits.request, begun=True)
        self._inner.connection_made(transport)

    def expect_request(self, seconds: float, *, begun: bool) -> None:
        """A whole request has to arrive within so many seconds. ``begun``: no byte of it starts the time anew."""
        self._begun = begun
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._late)
        self._owner.waits(self, unasked=True)

    def expect_nothing(self) -> None:
        """The client waits for its answer."""
        self._begun = True
        self._stop_timer()
        self._owner.waits(self, unasked=False)

    def drop(self) -> None:
        """End the connection at once."""
        self._forget()
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._admitted:
            return
        if not self._begun:
            self._parsing = 0.0
            self.expect_request(self._owner.limits.request, begun=True)
        started = time.thread_time()
        self._inner.data_received(data)
        self._parsing += time.thread_time() - started
        if self._parsing > self._owner.limits.parsing:
            self._late()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._admitted else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._admitted:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._reading = asyncio.get_running_loop().call_later(self._owner.limits.reading, self._late)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._inner.resume_writing()

    def _late(self) -> None:
        self._owner.late += 1
        self.drop()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget(self) -> None:
        self._stop_timer()
        if self._reading is not None:
            self._reading.cancel()
        self._owner.left(self._peer, self)


def peer_of(name: object) -> Peer:
    """The address of a client, as transports and ASGI scopes give it (IPv6 with more parts)."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple | list) and len(name) > 1 else ("", 0)
