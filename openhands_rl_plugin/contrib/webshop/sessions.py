"""The shop's sessions by key, bounded in number and in idle time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from openhands_rl_plugin.contrib.webshop.engine import WebShopSession
from openhands_rl_plugin.core.errors import RLError


class UnknownSessionError(RLError):
    """No session has that key: it was never started, was closed, or has expired."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no session '{key}': start one with /reset or /create; idle ones expire")


class TooManySessionsError(RLError):
    """Every session is in use and no more may be started."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} sessions are in use: close some with /close, or try again later")


@dataclass(slots=True)
class _Entry:
    session: WebShopSession
    last_used: float


class SessionTable:
    """Sessions by key, least recently used first. For one thread.

    Args:
        limit: the most sessions held at once.
        ttl_s: seconds without use after which a session expires.
        evictable_after_s: seconds without use after which a full table may drop a session for a new one; a
            finished episode may be dropped at once.
        clock: seconds that only grow.
    """

    def __init__(self, *, limit: int, ttl_s: float, evictable_after_s: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._evictable_after_s = evictable_after_s
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        self._drop_expired()
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        self._drop_expired()
        return key in self._entries

    def held(self) -> tuple[str, ...]:
        """The keys of all sessions, least recently used first."""
        self._drop_expired()
        return tuple(self._entries)

    def put(self, key: str, session: WebShopSession) -> None:
        """Start or replace the session of `key`; raises TooManySessionsError."""
        self._drop_expired()
        if key not in self._entries and len(self._entries) >= self._limit:
            self._make_room()
        self._entries[key] = _Entry(session, self._clock())
        self._entries.move_to_end(key)

    def get(self, key: str) -> WebShopSession:
        """The session of `key`, which counts as a use; raises UnknownSessionError."""
        self._drop_expired()
        entry = self._entries.get(key)
        if entry is None:
            raise UnknownSessionError(key)
        entry.last_used = self._clock()
        self._entries.move_to_end(key)
        return entry.session

    def close(self, key: str) -> bool:
        """Remove the session of `key`; returns whether there was one."""
        self._drop_expired()
        return self._entries.pop(key, None) is not None

    def _make_room(self) -> None:
        key, oldest = next(iter(self._entries.items()))
        idle_s = self._clock() - oldest.last_used
        if not oldest.session.done and idle_s < self._evictable_after_s:
            raise TooManySessionsError(self._limit)
        del self._entries[key]

    def _drop_expired(self) -> None:
        expired_before = self._clock() - self._ttl_s
        while self._entries:
            key, oldest = next(iter(self._entries.items()))
            if oldest.last_used > expired_before:
                return
            del self._entries[key]
