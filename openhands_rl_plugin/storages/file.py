"""Trajectories and scores in plain files: no server, nothing to set up, readable with ``jq .record``."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from openhands_rl_plugin.errors import StorageError, describe
from openhands_rl_plugin.records import TrajectoryFilter
from openhands_rl_plugin.storages.log import AppendLog, Entry
from openhands_rl_plugin.storages.matching import matches, may_match
from openhands_rl_plugin.types import SCHEMA_VERSION, Frozen, Score, Trajectory

Found = tuple[Trajectory, tuple[Score, ...]]
Record = tuple[str, bytes]

# So many trajectories are in memory at a time while a reader streams.
_READ_AHEAD = 16


class FileTrajectoryStorage:
    """Append-only files below ``path``, which several processes may share.

    ``add`` and ``add_scores`` return when the record is on the disk (``durable``); records that arrive while another is
    being flushed share the next flush. What was acknowledged survives ``kill -9``, and half a record is never read. An
    id that was stored twice, by whichever processes, is read once, as it was stored first.
    """

    def __init__(self, path: str | Path, durable: bool = True) -> None:
        folder = Path(path).expanduser()
        self._trajectories = AppendLog(folder / "trajectories", unique=True, durable=durable)
        self._scores = AppendLog(folder / "scores", unique=False, durable=durable)
        self._process = os.getpid()
        self._pending: list[_Pending] = []
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._writer: ThreadPoolExecutor | None = None

    async def add(self, trajectory: Trajectory) -> None:
        """Store; a second call with the same id changes nothing. Raises ``StorageError``."""
        await self._write(_Pending(self._trajectories, (_record(trajectory.id, trajectory),)))

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """Append judgements, all or none of them. Raises ``StorageError``."""
        if scores:
            await self._write(_Pending(self._scores, tuple(_record(score.trajectory_id, score) for score in scores)))

    async def get(self, trajectory_id: str) -> Found | None:
        """One trajectory with its scores, oldest first, or ``None``. Raises ``StorageError``."""
        async for found in self.find(TrajectoryFilter(ids=(trajectory_id,))):
            return found
        return None

    async def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[Found]:
        """Stream what matches, with its scores (oldest first), in the order in which it was stored.

        A few records are held at a time. What is added while the stream is read is not part of it. Raises
        ``StorageError`` for a damaged file.
        """
        where = where or TrajectoryFilter()
        left = where.limit
        for entries in batched(await asyncio.to_thread(self._candidates, where), _READ_AHEAD):
            if left == 0:
                return
            for found in (await asyncio.to_thread(self._load, entries, where))[:left]:
                yield found
                left = left - 1 if left is not None else None

    async def close(self) -> None:
        """Flush and release."""
        if (writer := self._writer) is not None:
            self._writer = None
            await asyncio.to_thread(writer.shutdown)
        self._trajectories.close()
        self._scores.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _write(self, item: _Pending) -> None:
        if os.getpid() != self._process:
            raise StorageError("a storage cannot be carried over a fork; open it in the process that uses it")
        with self._lock:
            self._pending.append(item)
            if self._writer is None:
                self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectory-storage")
        try:
            future = self._writer.submit(self._settle, item)
        except RuntimeError:
            # No threads are to be had once the interpreter shuts down, which is when a last episode may be saved.
            self._settle(item)
        else:
            await asyncio.wrap_future(future)

    def _settle(self, item: _Pending) -> None:
        """Store all that waits, of which ``item`` is a part unless an earlier call has settled it already."""
        with self._settling:
            if not item.settled:
                with self._lock:
                    waiting = list(self._pending)
                for log in (self._trajectories, self._scores):
                    _append(log, [each for each in waiting if each.log is log])
                with self._lock:
                    del self._pending[: len(waiting)]
        if item.error is not None:
            raise StorageError(str(item.error)) from item.error

    def _candidates(self, where: TrajectoryFilter) -> list[Entry]:
        self._trajectories.refresh()
        self._scores.refresh()
        if where.ids is None:
            return self._trajectories.entries()
        return sorted(entry for id_ in set(where.ids) for entry in self._trajectories.entries_of(id_)[:1])

    def _load(self, entries: Sequence[Entry], where: TrajectoryFilter) -> list[Found]:
        documents = zip(entries, self._trajectories.read(entries), strict=True)
        likely = ((entry, document) for entry, document in documents if may_match(where, document))
        found = ((_parse(Trajectory, *each), self._scores_of(each[0].id)) for each in likely)
        return [(trajectory, scores) for trajectory, scores in found if matches(where, trajectory, scores)]

    def _scores_of(self, trajectory_id: str) -> tuple[Score, ...]:
        entries = self._scores.entries_of(trajectory_id)
        return tuple(_parse(Score, *each) for each in zip(entries, self._scores.read(entries), strict=True))


@dataclass(eq=False)
class _Pending:
    """One call on its way to the disk. ``settled``: it was stored, or ``error`` says why not."""

    log: AppendLog
    records: tuple[Record, ...]
    settled: bool = False
    error: StorageError | None = None


def _append(log: AppendLog, items: Sequence[_Pending]) -> None:
    try:
        log.append([record for item in items for record in item.records])
    except StorageError as error:
        for item in items:
            item.error = error
    for item in items:
        item.settled = True


def _record(id_: str, value: Frozen) -> Record:
    try:
        return id_, value.model_dump_json().encode()
    except PydanticSerializationError as error:
        raise StorageError(f"{type(value).__name__} {id_!r} cannot be written as JSON: {describe(error)}") from error


def _parse[Value: Frozen](kind: type[Value], entry: Entry, document: bytes) -> Value:
    try:
        return kind.model_validate_json(document)
    except ValidationError as error:
        version = json.loads(document).get("schema_version", SCHEMA_VERSION)
        if version > SCHEMA_VERSION:
            cause = f"is of schema version {version}, newer than {SCHEMA_VERSION}; upgrade openhands_rl_plugin"
        else:
            cause = f"is not a {kind.__name__}: {describe(error)}"
        raise StorageError(f"record {entry.id!r} in {entry.segment} {cause}") from error
