"""What a server tells of its requests: metrics by route, and a line of the access log each, without bodies and keys."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import traceback
from collections.abc import Collection
from pathlib import Path

from openhands_rl_plugin.core.errors import DEBUG, describe
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers.connections import Connections, Peer
from openhands_rl_plugin.core.servers.metrics import Metrics

_LOG = redacting_logger(__name__)
ACCESS = "openhands_rl_plugin.access"
_LONGEST_PATH = 200
_METHODS = frozenset({"GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"})


class ObservedRequests:
    """The requests of one server. ``routes``: the paths that metrics tell apart; any other is ``none``."""

    def __init__(self, metrics: Metrics, connections: Connections, routes: Collection[str] = ()) -> None:
        self._routes = frozenset(routes)
        self._log = redacting_logger(ACCESS)
        self._count = metrics.counter("http_requests_total", "Requests by method, route and class of status.")
        self._seconds = metrics.histogram("http_request_duration_seconds", "Seconds to the end of the response.")
        metrics.read("http_connections", "Open connections.", lambda: [({}, len(connections))])
        late = "Connections that were dropped because they took too long."
        metrics.read("http_connections_late_total", late, lambda: [({}, connections.late)], "counter")
        full = "Connections that were refused because too many were open."
        metrics.read("http_connections_refused_total", full, lambda: [({}, connections.refused)], "counter")

    def ended(self, method: str, path: str, status: int, seconds: float, peer: Peer | None, route: str = "") -> None:
        """One request is over. ``path``: without its query, where a key may stand. ``status`` 499: the client left."""
        handler = route or (path if path in self._routes else "none")
        method = method if method in _METHODS else "OTHER"
        self._count.add(method=method, handler=handler, status=f"{status // 100}xx")
        self._seconds.observe(seconds, method=method, handler=handler)
        if self._log.isEnabledFor(logging.INFO):
            # As ASCII: no control characters reach a terminal or break the line.
            shown = path[:_LONGEST_PATH].encode("ascii", "backslashreplace").decode()
            shown = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in shown)
            self._log.info("%s %s %s %d %.3f s", peer[0] if peer else "-", method, shown, status, seconds)


def note_failure(error: BaseException) -> str:
    """Log in one line what nobody expected, with its traceback where ``DEBUG`` is set.

    What the client is told: a number that leads to the line, and nothing else.
    """
    number = secrets.token_hex(4)
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    shown = error if os.environ.get(DEBUG) else None
    _LOG.error("request %s failed: %s (%s; %s=1 shows more)", number, describe(error), place, DEBUG, exc_info=shown)
    return f"The server failed; its log has the cause under {number}."


def log_accesses() -> None:
    """Print the access log to standard error."""
    logger = redacting_logger(ACCESS)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
