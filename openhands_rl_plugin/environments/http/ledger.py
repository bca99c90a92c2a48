"""Running episodes on servers without sessions, which cannot run two episodes of one task at a time."""

from __future__ import annotations

import threading
import weakref
from enum import Enum, auto


class Claim(Enum):
    """The decision on a client's request to start an episode."""

    GRANTED = auto()
    """Start: no other client runs this task, or the server has sessions."""
    UNDECIDED = auto()
    """Wait: another client is starting this task; its answer will show whether the server has sessions."""
    TAKEN = auto()
    """Refused: the server has no sessions and another client runs this task."""


class EpisodeLedger:
    """Claims on (server, task index) within this process; safe to use from several threads.

    Players (clients) are referenced weakly, so one that was dropped without ``close`` blocks no other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._players: weakref.WeakValueDictionary[tuple[str, int], object] = weakref.WeakValueDictionary()
        self._playing: weakref.WeakSet[object] = weakref.WeakSet()
        self._with_sessions: set[str] = set()

    def claim(self, server: str, index: int, player: object) -> Claim:
        """Request a claim before an episode is opened; repeated requests are allowed."""
        with self._lock:
            if server in self._with_sessions:
                return Claim.GRANTED
            holder = self._players.setdefault((server, index), player)
            if holder is player:
                return Claim.GRANTED
            return Claim.TAKEN if holder in self._playing else Claim.UNDECIDED

    def opened_with_session(self, server: str, index: int, player: object) -> None:
        """The server returned a session, so it needs no claims."""
        with self._lock:
            self._with_sessions.add(server)
        self.release(server, index, player)

    def opened_without_session(self, server: str, index: int, player: object) -> Claim:
        """The server returned no session: the claim of ``player``, which shares the episode unless it is granted."""
        with self._lock:
            self._with_sessions.discard(server)
        if (claim := self.claim(server, index, player)) is Claim.GRANTED:
            self._playing.add(player)
        return claim

    def release(self, server: str, index: int, player: object) -> None:
        """Release the claim, if ``player`` holds it."""
        with self._lock:
            self._playing.discard(player)
            if self._players.get((server, index)) is player:
                del self._players[(server, index)]
