"""The text indexes of the stores: filled in the background from the first question on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.trajectories.query.query import Note, Query
from openhands_rl_plugin.trajectories.query.text_index import TextIndex

_LOG = redacting_logger(__name__)
_FIRST = 1.0
"""Seconds that the first question waits for an answer from all texts."""
_PAUSE = 2.0
"""Seconds between two looks for what has ended."""


class SearchIndexes:
    """Store -> its index. Nobody who searches nothing pays for one."""

    def __init__(self, sources: StudioSources) -> None:
        self._sources = sources
        self._indexes: Mapping[str, TextIndex] = sources.indexes
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def of(self, storage: TrajectoryStorage, query: Query | None = None) -> TextIndex | None:
        """The index of a store, which begins to be filled, where ``query`` (by default any) needs one."""
        needed = query is None or query.texts or any(note.note is Note.BREAK for note in query.notes)
        name = next((name for name, each in self._sources.stores.items() if each is storage), "")
        if not needed or name not in self._indexes:
            return None
        if name not in self._tasks:
            filled = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._fill(storage, self._indexes[name], filled))
            # A small store is searched whole at the first question.
            with suppress(TimeoutError):
                await asyncio.wait_for(filled.wait(), _FIRST)
        return self._indexes[name]

    async def close(self) -> None:
        """End what fills them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _fill(self, storage: TrajectoryStorage, index: TextIndex, filled: asyncio.Event) -> None:
        while True:
            try:
                await index.update(storage)
            except StorageError as error:
                _LOG.error("texts are not searched: %s", error)
            filled.set()
            await asyncio.sleep(_PAUSE)


def progress_of(index: TextIndex | None) -> JsonObject | None:
    """How much of a store is searched."""
    return None if index is None else {"done": index.done, "total": index.total}
