"""``/api/events``: what happens, as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from openhands_rl_plugin.apps.loop.parts import STATE
from openhands_rl_plugin.contrib.studio.runs import metrics_files, stage_of
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.protocols import TellsChanges
from openhands_rl_plugin.core.records import StoreChanges
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.training.loop.plan import LoopState

_PAUSE = 0.5
"""Seconds between two looks."""
_SILENCE = 15.0
"""Seconds after which a comment shows that the connection is alive."""
_MOST_STREAMS = 16

_Seen = dict[str, int]


class EventResource:
    """Streams of events. Each looks for itself, so that one that comes back goes on where it was."""

    def __init__(self, sources: StudioSources) -> None:
        self._sources = sources
        self._open = 0
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End all streams. From the event loop's own thread."""
        self._stopped.set()

    async def stream(self, request: Request) -> Response:
        """``began, grew, ended, gone, scored, label, stage, metric, reset``. Raises ``HTTPException`` 503."""
        if self._open >= _MOST_STREAMS:
            raise HTTPException(503, "too many pages listen already; close some")
        last = request.headers.get("last-event-id") or request.query_params.get("last")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(last), media_type="text/event-stream", headers=headers)

    async def _events(self, last: str | None) -> AsyncIterator[str]:
        self._open += 1
        try:
            cursors, runs = await self._begin(last), await asyncio.to_thread(_look, self._sources.runs)
            yield f"retry: 1000\n{_event('open', {}, cursors)}"
            quiet, names = 0.0, self._sources.names()
            while not self._stopped.is_set():
                said = [event async for event in self._changes(cursors)]
                if names != self._sources.names():
                    names = self._sources.names()
                    cursors |= {name: each for name, each in (await self._begin(None)).items() if name not in cursors}
                    said.append(_event("reset", {"why": "there is more to show"}, cursors))
                now = await asyncio.to_thread(_look, self._sources.runs)
                said += [_event(kind, body, cursors) for kind, body in _happened(self._sources.runs, runs, now)]
                runs = now
                quiet = 0.0 if said else quiet + _PAUSE
                if quiet >= _SILENCE:
                    said, quiet = [": alive\n\n"], 0.0
                for event in said:
                    yield event
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), _PAUSE)
        finally:
            self._open -= 1

    async def _begin(self, last: str | None) -> dict[str, str]:
        known = _read_id(last) if last else {}
        found: dict[str, str] = {}
        for name, storage in self._sources.stores.items():
            if isinstance(storage, TellsChanges):
                found[name] = known.get(name) or (await storage.changed_since(None)).cursor
        return found

    async def _changes(self, cursors: dict[str, str]) -> AsyncIterator[str]:
        for name, cursor in list(cursors.items()):
            storage = self._sources.stores[name]
            assert isinstance(storage, TellsChanges), "only those have cursors"
            try:
                changes = await storage.changed_since(cursor)
            except StorageError as error:
                # A cursor of another store of this name, or a store that is away: the page looks again.
                with suppress(StorageError):
                    cursors[name] = (await storage.changed_since(None)).cursor
                    yield _event("reset", {"store": name, "why": str(error)}, cursors)
                continue
            cursors[name] = changes.cursor
            for kind, body in _told(name, changes):
                yield _event(kind, body, cursors)


def _told(store: str, changes: StoreChanges) -> list[tuple[str, JsonObject]]:
    found: list[tuple[str, JsonObject]] = []
    if changes.more:
        return [("reset", {"store": store, "why": "much has changed"})]
    ids = {"began": changes.began, "grew": changes.grew, "ended": changes.ended, "scored": changes.scored}
    for kind, named in (ids | {"label": changes.labelled}).items():
        if named:
            found.append((kind, {"store": store, "ids": list(named)}))
    if changes.gone:
        found.append(("gone", {"store": store, "count": changes.gone}))
    return found


def _look(runs: Mapping[str, Path]) -> dict[str, _Seen]:
    """Run -> the sizes of its files of metrics, and the time of its state."""
    found: dict[str, _Seen] = {}
    for name, directory in runs.items():
        seen: _Seen = {}
        with suppress(OSError):
            seen[STATE] = (directory / STATE).stat().st_mtime_ns
        for file in metrics_files(directory):
            with suppress(OSError):
                seen[file] = (directory / file).stat().st_size
        found[name] = seen
    return found


def _happened(
    runs: Mapping[str, Path], before: Mapping[str, _Seen], after: Mapping[str, _Seen]
) -> list[tuple[str, JsonObject]]:
    found: list[tuple[str, JsonObject]] = []
    for name, seen in after.items():
        for file, state in seen.items():
            if before.get(name, {}).get(file) == state:
                continue
            if file != STATE:
                found.append(("metric", {"run": name, "file": file, "size": state}))
                continue
            with suppress(StorageError, OSError):
                records = LoopState.load(runs[name] / STATE).records
                found.append(
                    ("stage", {"run": name, "stages": len(records), **(stage_of(records[-1]) if records else {})})
                )
    return found


def _event(kind: str, body: JsonObject, cursors: Mapping[str, str]) -> str:
    identity = base64.urlsafe_b64encode(json.dumps(cursors).encode()).decode()
    return f"id: {identity}\nevent: {kind}\ndata: {json.dumps(body)}\n\n"


def _read_id(text: str) -> dict[str, str]:
    """The cursors of an event's id; none where it is not one of ours."""
    try:
        found = json.loads(base64.urlsafe_b64decode(text.encode()))
    except ValueError:
        return {}
    return {str(name): str(cursor) for name, cursor in found.items()} if isinstance(found, dict) else {}
