"""Who plays which task on servers that cannot keep two episodes of one task apart."""

from __future__ import annotations

import threading
import weakref
from enum import Enum, auto


class Claim(Enum):
    """The answer to a player who wants to start an episode."""

    GRANTED = auto()
    """Start: nobody else plays this task, or the server keeps sessions apart."""
    UNDECIDED = auto()
    """Wait: somebody is starting this task, and the answer will tell whether the server has sessions."""
    TAKEN = auto()
    """The server has no sessions and somebody plays this task."""


class EpisodeLedger:
    """Claims on (server, task index) within this process; safe to use from several threads.

    Players are held weakly, so that one that was dropped without being closed blocks nobody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._players: weakref.WeakValueDictionary[tuple[str, int], object] = weakref.WeakValueDictionary()
        self._playing: weakref.WeakSet[object] = weakref.WeakSet()
        self._with_sessions: set[str] = set()

    def claim(self, server: str, index: int, player: object) -> Claim:
        """Ask before an episode is opened; asking again is allowed."""
        with self._lock:
            if server in self._with_sessions:
                return Claim.GRANTED
            holder = self._players.setdefault((server, index), player)
            if holder is player:
                return Claim.GRANTED
            return Claim.TAKEN if holder in self._playing else Claim.UNDECIDED

    def opened_with_session(self, server: str, index: int, player: object) -> None:
        """The server gave a session: no claims are needed there."""
        with self._lock:
            self._with_sessions.add(server)
        self.release(server, index, player)

    def opened_without_session(self, server: str, index: int, player: object) -> Claim:
        """The server gave none: ``player`` keeps its claim, or learns that it had none and shares the episode."""
        with self._lock:
            self._with_sessions.discard(server)
        if (claim := self.claim(server, index, player)) is Claim.GRANTED:
            self._playing.add(player)
        return claim

    def release(self, server: str, index: int, player: object) -> None:
        """Give the claim back, if ``player`` has it."""
        with self._lock:
            self._playing.discard(player)
            if self._players.get((server, index)) is player:
                del self._players[(server, index)]
