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
_LEAST, _MOST = 1024, 16 * 1024
"""Bytes of one connection in one turn of the event loop. Of tiny chunks h11 takes a second for the usual 256 KiB, so
that it begins with few, gets more while they are cheap, and few again when they were dear."""
_DEAR = 0.003
"""Seconds of processor time in one turn; who takes more waits for the next among all who do."""
_REST = 3.0
"""For each second of dear turns, of all connections together, so many for everything else."""
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
        self._next_turn = 0.0
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

    def until_turn(self, seconds: float) -> float:
        """Seconds until a connection whose last turn took ``seconds`` has another; one has it after the other."""
        now = time.monotonic()
        turn = max(now, self._next_turn) + _REST * seconds
        self._next_turn = turn + seconds
        return turn - now

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


class _Pausable:
    """A transport that is read while both the library and the bounds want it to be."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._wanted, self._held = True, False

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def pause_reading(self) -> None:
        self._wanted = False
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._wanted = True
        if not self._held:
            self._transport.resume_reading()

    def hold(self, held: bool) -> None:
        """The bounds' own pause."""
        if held == self._held:
            return
        self._held = held
        if held or not self._wanted:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class _Bounded(asyncio.Protocol):
    """Passes everything on to ``inner``, and aborts the connection when it takes too long."""

    def __init__(self, inner: asyncio.Protocol, owner: Connections) -> None:
        self._inner = inner
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._pausable: _Pausable | None = None
        self._peer: Peer = ("", 0)
        self._admitted = False
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._parsing = 0.0
        self._received = bytearray()
        self._piece = _LEAST
        self._turn: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        with suppress(AttributeError):  # other event loops than asyncio's
            setattr(transport, "max_size", _MOST)  # noqa: B010
        self._peer = peer_of(transport.get_extra_info("peername"))
        self._admitted = self._owner.admit(self._peer, self)
        if not self._admitted:
            self._transport.write(_REFUSED)
            self._transport.close()
            return
        self.expect_request(self._owner.limits.request, begun=True)
        self._pausable = _Pausable(self._transport)
        self._inner.connection_made(cast(asyncio.Transport, self._pausable))

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
        self._received += data
        if self._turn is None:
            self._pass_on()

    def _pass_on(self) -> None:
        """What was received, in pieces; the rest after the others' turns where that is dear."""
        self._turn, spent = None, 0.0
        while self._received and self._turn is None:
            if self._transport is None or self._transport.is_closing():
                return self._received.clear()
            piece = bytes(self._received[: self._piece])
            del self._received[: self._piece]
            started = time.thread_time()
            self._inner.data_received(piece)
            seconds = time.thread_time() - started
            spent, self._parsing = spent + seconds, self._parsing + seconds
            if self._parsing > self._owner.limits.parsing:
                return self._late()
            self._piece = _LEAST if spent > _DEAR else min(2 * self._piece, _MOST)
            if spent > _DEAR:
                self._turn = asyncio.get_running_loop().call_later(self._owner.until_turn(spent), self._pass_on)
        if self._pausable is not None:
            self._pausable.hold(self._turn is not None)

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
        self._received.clear()
        if self._turn is not None:
            self._turn.cancel()
        if self._reading is not None:
            self._reading.cancel()
        self._owner.left(self._peer, self)


def peer_of(name: object) -> Peer:
    """The address of a client, as transports and ASGI scopes give it (IPv6 with more parts)."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple | list) and len(name) > 1 else ("", 0)
