"""What happened to tasks and episodes: noted with the change itself, and streamed to whoever listens."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from openhands_rl_plugin.contrib.rollouts.database import Database
from openhands_rl_plugin.core.types import JsonObject

_KEPT = 20_000
_AT_ONCE = 500
_PAUSE = 0.25
"""Seconds between two looks."""
_SILENCE = 15.0
"""Seconds after which a comment shows that the connection is alive."""
_MOST_STREAMS = 16


class Event(NamedTuple):
    """``number`` grows; ``body`` is JSON."""

    number: int
    kind: str
    body: str


def note(db: sqlite3.Connection, kind: str, body: JsonObject) -> None:
    """Add an event to the transaction of what it tells of; the oldest go."""
    number = db.execute("INSERT INTO events (kind, body) VALUES (?, ?)", (kind, json.dumps(body))).lastrowid
    if number is not None and number % 256 == 0:
        db.execute("DELETE FROM events WHERE number <= ?", (number - _KEPT,))


def newest(database: Database) -> int:
    """The number of the newest event; 0 where there is none."""
    with database.reading() as db:
        return int(db.execute("SELECT COALESCE(MAX(number), 0) FROM events").fetchone()[0])


def events_after(database: Database, number: int) -> list[Event]:
    """The next events, oldest first; at most a few hundred."""
    with database.reading() as db:
        rows = db.execute("SELECT * FROM events WHERE number > ? ORDER BY number LIMIT ?", (number, _AT_ONCE))
        return [Event(row["number"], row["kind"], row["body"]) for row in rows]


class EventStream:
    """``GET /events``: server-sent events; with ``Last-Event-ID`` a client that comes back misses nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._open = 0
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End all streams. From the event loop's own thread."""
        self._stopped.set()

    async def stream(self, request: Request) -> Response:
        """Raises ``HTTPException`` 503 where too many listen."""
        if self._open >= _MOST_STREAMS:
            raise HTTPException(503, "too many clients listen already")
        last = request.headers.get("last-event-id", "")
        known = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else None
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(known), media_type="text/event-stream", headers=headers)

    async def _events(self, known: int | None) -> AsyncIterator[str]:
        self._open += 1
        try:
            number = await asyncio.to_thread(newest, self._database) if known is None else known
            yield ": open\n\n"
            quiet = 0.0
            while not self._stopped.is_set():
                found = await asyncio.to_thread(events_after, self._database, number)
                for each in found:
                    number = each.number
                    yield f"id: {each.number}\nevent: {each.kind}\ndata: {each.body}\n\n"
                quiet = 0.0 if found else quiet + _PAUSE
                if quiet >= _SILENCE:
                    yield ": alive\n\n"
                    quiet = 0.0
                if len(found) < _AT_ONCE:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._stopped.wait(), _PAUSE)
        finally:
            self._open -= 1
