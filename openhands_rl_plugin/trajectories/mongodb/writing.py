"""Every change to the episodes of a MongoDB store, atomic to readers without transactions.

A stand-alone server has none. So what is new goes into the log first (``log``), where no reader looks, and then
one change of the episode's own document makes it valid. The first document of a log that is not valid yet, or no more,
says since when it is ``pending``, so that a later process removes the remains of a killed one.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from pymongo.errors import BulkWriteError, DuplicateKeyError

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.trajectories.mongodb.client import MongoDatabase
from openhands_rl_plugin.trajectories.mongodb.headers import StoredEpisode, change_to, new_document
from openhands_rl_plugin.trajectories.mongodb.log import (
    LogEntry,
    end_record,
    generation_of,
    growth_records,
    log_documents,
    log_range,
    place,
    replay,
    start_record,
)
from openhands_rl_plugin.trajectories.storages.header import EpisodeHeader, Spine, marked
from openhands_rl_plugin.trajectories.storages.packing import packed_end, packed_json

_DUPLICATE_KEY = 11000
# Writers of one episode make way for each other; so many conflicts in a row have another cause.
_ATTEMPTS = 20
# So many open episodes are remembered, which spares reading their nodes again whenever they grow.
_REMEMBERED = 256
# No call takes as long, so what is pending for longer was left by a process that is gone.
_ABANDONED_SECONDS = 3600.0
_ABANDONED_AT_ONCE = 1000


@dataclass
class _Standing:
    """Where an open episode stands; ``length`` counts the documents of its log."""

    header: EpisodeHeader
    generation: str
    length: int
    start: EpisodeStart
    spine: Spine
    head: int | None

    def grown(self) -> EpisodeHeader:
        """Its header as of now. Raises ``StorageError`` when its head is no node."""
        return self.header.grown(self.spine, self.head, time.time())


class MongoEpisodeWriter:
    """Calls for one episode take turns here; other processes may write the same one."""

    def __init__(self, database: MongoDatabase) -> None:
        self._database = database
        self._standings: OrderedDict[str, _Standing] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def add(self, trajectory: Trajectory) -> None:
        """Store a finished episode, in the place of an unfinished one of the same id."""
        start, end = EpisodeStart.of(trajectory), EpisodeEnd.of(trajectory)
        header = EpisodeHeader.begun(start).ended(Spine(trajectory.nodes), end)
        records = [
            start_record(packed_json(start)),
            *growth_records(trajectory.nodes, 0, trajectory.head, ()),
            end_record(packed_end(start, end)),
        ]
        await self._store(header, records, is_open=False)

    async def begin(self, start: EpisodeStart) -> None:
        """Open an episode, unless its id is known."""
        await self._store(EpisodeHeader.begun(start), [start_record(packed_json(start))], is_open=True)

    async def grow(self, growth: EpisodeGrowth) -> None:
        """Append nodes and marks to an open episode."""
        identity = growth.trajectory_id
        async with self._turn(identity):
            for _ in range(_ATTEMPTS):
                standing = await self._take_open(identity, growth.first)
                if standing is None:
                    await self._check_nothing_new(growth)
                    return
                if await self._grow(standing, growth):
                    return
        raise _contested(identity)

    async def end(self, end: EpisodeEnd) -> None:
        """Close an episode, unless it is closed already."""
        identity = end.trajectory_id
        async with self._turn(identity):
            for _ in range(_ATTEMPTS):
                standing = await self._take_open(identity)
                if standing is None:
                    return
                header = standing.header.ended(standing.spine, end)
                record = end_record(packed_end(standing.start, end))
                if await self._append(standing, header, [record], is_open=False):
                    return
        raise _contested(identity)

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """Forget unfinished episodes, with their scores."""
        return sum([await self._drop(identity) for identity in trajectory_ids])

    async def sweep(self) -> None:
        """Remove the remains of killed processes."""
        old = {"pending": {"$lt": time.time() - _ABANDONED_SECONDS}}
        found = self._database.chunks.find(old, {"episode": 1}).limit(_ABANDONED_AT_ONCE)
        for chunk in await found.to_list():
            generation = generation_of(chunk)
            valid = {"_id": chunk["episode"], "generation": generation}
            if await self._database.episodes.find_one(valid, {"_id": 1}):
                await self._mark(generation, valid=True)
            else:
                await self._delete(generation)

    async def _store(self, header: EpisodeHeader, records: Sequence[LogEntry], *, is_open: bool) -> None:
        """A whole new log and the document that makes it valid, unless the id is known well enough."""
        async with self._turn(header.id):
            for _ in range(_ATTEMPTS):
                found = await self._database.episodes.find_one({"_id": header.id}, {"open": 1, "generation": 1})
                if found is not None and (is_open or not found["open"]):
                    return
                generation = uuid.uuid4().hex
                documents = log_documents(header.id, generation, 0, records)
                documents[0]["pending"] = time.time()
                await self._database.chunks.insert_many(documents)
                change = header, generation, len(documents), is_open
                if await (self._insert(*change) if found is None else self._replace(found["generation"], *change)):
                    await self._mark(generation, valid=True)
                    return
                await self._delete(generation)
        raise _contested(header.id)

    async def _insert(self, header: EpisodeHeader, generation: str, chunks: int, is_open: bool) -> bool:
        order = await self._database.next("episodes")
        document = new_document(header, order=order, generation=generation, chunks=chunks, is_open=is_open)
        try:
            await self._database.episodes.insert_one(document)
        except DuplicateKeyError:
            return False
        return True

    async def _replace(self, old: str, header: EpisodeHeader, generation: str, chunks: int, is_open: bool) -> bool:
        self._standings.pop(header.id, None)
        await self._mark(old, valid=False)
        where = {"_id": header.id, "generation": old, "open": True}
        change = change_to(header, generation=generation, chunks=chunks, is_open=is_open)
        if (await self._database.episodes.update_one(where, change)).matched_count == 0:
            return False
        await self._delete(old)
        return True

    async def _drop(self, identity: str) -> int:
        async with self._turn(identity):
            self._standings.pop(identity, None)
            found = await self._database.episodes.find_one({"_id": identity, "open": True}, {"generation": 1})
            if found is None:
                return 0
            await self._mark(found["generation"], valid=False)
            gone = await self._database.episodes.delete_one({**found, "open": True})
            if gone.deleted_count:
                await self._delete(found["generation"])
                await self._database.scores.delete_many({"episode": identity})
                await self._database.labels.delete_many({"episode": identity})
            return gone.deleted_count

    async def _grow(self, standing: _Standing, growth: EpisodeGrowth) -> bool:
        known = len(standing.spine)
        if growth.first > known:
            raise StorageError(
                f"episode {growth.trajectory_id!r} has {known} nodes and cannot grow from node {growth.first} on; "
                "store the nodes between them first"
            )
        new = growth.nodes[known - growth.first :]
        standing.spine.extend(new)
        standing.spine.mark(growth.marks)
        moved, standing.head = growth.head != standing.head, growth.head
        header = standing.grown()
        if new or growth.marks or moved:
            records = growth_records(new, known, growth.head, growth.marks)
            if not await self._append(standing, header, records, is_open=True):
                return False
        self._standings[growth.trajectory_id] = standing
        if len(self._standings) > _REMEMBERED:
            self._standings.popitem(last=False)
        return True

    async def _append(
        self, standing: _Standing, header: EpisodeHeader, records: Sequence[LogEntry], *, is_open: bool
    ) -> bool:
        """Append to the log and make that valid; false when another process came in between: look again."""
        before = standing.length
        documents = log_documents(header.id, standing.generation, before, records)
        try:
            await self._database.chunks.insert_many(documents)
        except BulkWriteError as error:
            if {each["code"] for each in error.details["writeErrors"]} == {_DUPLICATE_KEY}:
                return False
            raise
        standing.length += len(documents)
        if await self._make_valid(standing, header, is_open):
            return True
        now = await self._database.episodes.find_one({"_id": header.id, "generation": standing.generation})
        if now is None or now["chunks"] < standing.length:
            # Closed or gone, so what comes after the valid part will not be read any more.
            await self._database.chunks.delete_many(log_range(standing.generation, before))
        return False

    async def _make_valid(self, standing: _Standing, header: EpisodeHeader, is_open: bool) -> bool:
        where = {
            "_id": header.id,
            "generation": standing.generation,
            "open": True,
            "chunks": {"$lt": standing.length},
        }
        change = change_to(header, generation=standing.generation, chunks=standing.length, is_open=is_open)
        return (await self._database.episodes.update_one(where, change)).matched_count == 1

    async def _mark(self, generation: str, *, valid: bool) -> None:
        change = {"$unset": {"pending": ""}} if valid else {"$set": {"pending": time.time()}}
        await self._database.chunks.update_one({"_id": place(generation, 0)}, change)

    async def _delete(self, generation: str) -> None:
        # The first document goes last, because it says that the others are to go.
        await self._database.chunks.delete_many(log_range(generation, 1))
        await self._database.chunks.delete_one({"_id": place(generation, 0)})

    async def _take_open(self, identity: str, nodes: int = 0) -> _Standing | None:
        """Where an episode stands, ``None`` when it is finished. Raises ``StorageError`` when it is not known.

        Taken out of what is remembered, because after an error it may be wrong; put it back when all is written. With
        fewer ``nodes`` than the caller knows of it is out of date: another process has appended some.
        """
        standing = self._standings.pop(identity, None)
        if standing is not None and len(standing.spine) >= nodes:
            return standing
        for _ in range(_ATTEMPTS):
            episode = await self._known(identity)
            if not episode.open:
                return None
            documents = await self._log(episode.generation)
            if len(documents) < episode.chunks:
                continue  # It was replaced or dropped in this moment.
            replayed = replay(identity, documents)
            spine = Spine(replayed.nodes)
            standing = _Standing(
                episode.header, episode.generation, replayed.length, replayed.start, spine, replayed.head
            )
            if episode.chunks < standing.length:
                # What another process has appended (and then it was killed, or is just about to make it valid).
                await self._make_valid(standing, standing.grown(), is_open=True)
            return standing
        raise _contested(identity)

    async def _log(self, generation: str, end: int | None = None) -> list[dict[str, Any]]:
        return await self._database.chunks.find(log_range(generation, 0, end)).sort("_id").to_list()

    async def _known(self, identity: str) -> StoredEpisode:
        document = await self._database.episodes.find_one({"_id": identity})
        if document is None:
            raise StorageError(f"episode {identity!r} is not open; begin() it first")
        return StoredEpisode.read(document)

    async def _check_nothing_new(self, growth: EpisodeGrowth) -> None:
        episode = await self._known(growth.trajectory_id)
        nodes = replay(growth.trajectory_id, await self._log(episode.generation, episode.chunks)).nodes
        known = all(mark.index < len(nodes) for mark in growth.marks)
        if growth.first + len(growth.nodes) > len(nodes) or not known or marked(nodes, growth.marks) != nodes:
            raise StorageError(f"episode {growth.trajectory_id!r} is finished and grows no more")

    def _turn(self, identity: str) -> asyncio.Lock:
        return self._turns.setdefault(identity, asyncio.Lock())


def _contested(identity: str) -> StorageError:
    return StorageError(
        f"episode {identity!r} is written by several processes at once, again and again; let one of them write it"
    )
