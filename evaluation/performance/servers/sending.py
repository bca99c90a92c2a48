"""Sending bytes to a server and reading what comes back, without an HTTP library."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from evaluation.performance.servers.requests import Hostile

HANGS_AFTER = 5.0
_GIVES_UP_AFTER = 30.0
_HALF_SECONDS = 0.02
_MOST = 4 * 1024**2


@dataclass(frozen=True)
class Outcome:
    """``label``: the status, ``closed`` without one, ``half`` for a cut request, ``refused`` where nobody listens."""

    label: str
    seconds: float
    answer: bytes = b""


def send(url: str, request: Hostile) -> Outcome:
    """Send one request on a connection of its own."""
    place = urlsplit(url)
    started = time.monotonic()
    try:
        client = socket.create_connection((place.hostname or "", place.port or 0), timeout=_GIVES_UP_AFTER)
    except OSError:
        return Outcome("refused", time.monotonic() - started)
    with client:
        try:
            client.sendall(request.data)
            if request.half:
                time.sleep(_HALF_SECONDS)
                return Outcome("half", 0.0)
        except OSError:
            pass  # it was refused before its end: the answer is there
        answer = _answer(client)
    status = answer.split(b" ", 2)[1].decode("latin-1") if answer.startswith(b"HTTP/1.") else "closed"
    return Outcome(status, time.monotonic() - started, answer)


def _answer(client: socket.socket) -> bytes:
    answer = b""
    try:
        while len(answer) < _MOST and (part := client.recv(65536)):
            answer += part
    except OSError:
        pass
    return answer
