"""One-time tokens in links, and the sessions of the browsers that opened one."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Iterable

COOKIE = "openhands_rl_studio"
_BYTES = 24
_MOST_SESSIONS = 64


class Tickets:
    """A token opens one session and is then worth nothing; the next link has another. Safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token = secrets.token_urlsafe(_BYTES)
        self._sessions: list[str] = []

    @property
    def token(self) -> str:
        """The token of the next link."""
        with self._lock:
            return self._token

    def spend(self, token: str) -> str | None:
        """The cookie of a new session, or ``None`` for a token that is wrong or was used before."""
        with self._lock:
            if not self.same(token, self._token):
                return None
            self._token = secrets.token_urlsafe(_BYTES)
        return self.open()

    def open(self) -> str:
        """The cookie of a new session; the oldest ends when there are too many."""
        with self._lock:
            self._sessions.append(secrets.token_urlsafe(_BYTES))
            del self._sessions[:-_MOST_SESSIONS]
            return self._sessions[-1]

    def knows(self, cookie_header: str) -> bool:
        """Whether a ``Cookie`` header has a session that is open."""
        with self._lock:
            sessions = list(self._sessions)
        return any(self.same(value, each) for value in _values(cookie_header) for each in sessions)

    @staticmethod
    def same(one: str, other: str) -> bool:
        """Whether two secrets are equal, in a time that tells nothing."""
        return hmac.compare_digest(one.encode("utf-8", "surrogateescape"), other.encode())


def _values(cookie_header: str) -> Iterable[str]:
    # Several headers are joined by commas, which no value here contains.
    for part in cookie_header.replace(",", ";").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            yield value
