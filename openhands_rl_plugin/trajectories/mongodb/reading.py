"""Every question to a MongoDB store: its episodes, and what has changed since a cursor.

Episodes, scores and labels have rising numbers. A writer takes a number first and writes what it numbers afterwards, so
a look in between finds a gap. The cursor keeps the gaps of the last minute, and they are looked for again.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from openhands_rl_plugin.core.errors import DamagedError, describe
from openhands_rl_plugin.core.records import StoreChanges, TrajectoryFilter, TrajectoryOrder, TrajectorySummary
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.trajectories.mongodb.client import Collection as Documents
from openhands_rl_plugin.trajectories.mongodb.client import MongoDatabase
from openhands_rl_plugin.trajectories.mongodb.headers import (
    COMPUTED_ORDERS,
    Query,
    StoredEpisode,
    order_of,
    query_of,
    summed,
)
from openhands_rl_plugin.trajectories.mongodb.log import log_range, replay
from openhands_rl_plugin.trajectories.storages.header import so_far, whole
from openhands_rl_plugin.trajectories.storages.packing import cursor_lost, page_lost

Log = Sequence[Mapping[str, Any]]

# An episode that is replaced while it is read is read again; that happens to it once.
_ATTEMPTS = 5


async def matching_ids(database: MongoDatabase, where: TrajectoryFilter) -> list[str]:
    """The ids of the matches, in the requested order."""
    if where.limit == 0:
        return []
    query = query_of(where)
    if where.after is not None:
        query = {"$and": [query, await _after(database, where)]}
    if (computed := COMPUTED_ORDERS.get(where.sort)) is not None:
        return await _sorted_by(database, query, where, computed)
    found = database.episodes.find(query, {"_id": 1}).sort(order_of(where)).skip(where.offset)
    return [document["_id"] async for document in found.limit(where.limit or 0)]


async def _sorted_by(database: MongoDatabase, query: Query, where: TrajectoryFilter, computed: Query) -> list[str]:
    stages: list[Query] = [
        {"$match": query},
        {"$project": {"order": 1, where.sort.value: computed}},
        {"$sort": dict(order_of(where))},
        {"$skip": where.offset},
        *([] if where.limit is None else [{"$limit": where.limit}]),
    ]
    found = await database.episodes.aggregate(stages, allowDiskUse=True)
    return [document["_id"] async for document in found]


async def _after(database: MongoDatabase, where: TrajectoryFilter) -> Query:
    """The query of what comes after an episode in that order. Raises ``StorageError`` when that one is gone."""
    last = await database.episodes.find_one({"_id": where.after})
    if last is None:
        raise page_lost(where.after or "")
    sign = "$lt" if where.descending else "$gt"
    if where.sort is TrajectoryOrder.STORED:
        return {"order": {sign: last["order"]}}
    later = {"order": {"$gt": last["order"]}}
    if (computed := COMPUTED_ORDERS.get(where.sort)) is not None:
        value = summed(last, where.sort)
        further, same = {"$expr": {sign: [computed, value]}}, {"$expr": {"$eq": [computed, value]}}
        return {"$or": [further, {"$and": [same, later]}]}
    key = where.sort.value
    if last[key] is None:
        return {key: None, **later}
    either: list[Query] = [{key: {sign: last[key]}}, {key: last[key], **later}]
    return {"$or": [*either, {"unrewarded": True}] if where.sort is TrajectoryOrder.REWARD else either}


async def count(database: MongoDatabase, where: TrajectoryFilter) -> int:
    """How many match, ``offset`` and ``limit`` aside."""
    return await database.episodes.count_documents(query_of(where))


async def load(database: MongoDatabase, ids: Sequence[str]) -> list[Trajectory]:
    """The trajectories of ``ids``, in that order; those that are gone are left out."""
    loaded: dict[str, Trajectory] = {}
    missing = list(ids)
    for _ in range(_ATTEMPTS):
        episodes = await _episodes(database, missing)
        logs = await _logs(database, episodes)
        missing = [episode.header.id for episode in episodes if len(logs[episode.header.id]) < episode.chunks]
        whole_ones = [episode for episode in episodes if episode.header.id not in missing]
        read = await asyncio.to_thread(_trajectories, whole_ones, logs)
        loaded |= {trajectory.id: trajectory for trajectory in read}
        if not missing:
            return [loaded[identity] for identity in ids if identity in loaded]
    raise DamagedError(f"a part of episode {missing[0]!r} is missing; restore the database from a backup")


async def load_summaries(database: MongoDatabase, ids: Sequence[str]) -> list[TrajectorySummary]:
    """The summaries of ``ids``, in that order; those that are gone are left out."""
    found = {episode.header.id: episode.summary() for episode in await _episodes(database, ids)}
    return [found[identity] for identity in ids if identity in found]


async def _episodes(database: MongoDatabase, ids: Sequence[str]) -> list[StoredEpisode]:
    found = database.episodes.find({"_id": {"$in": list(ids)}})
    return [StoredEpisode.read(document) async for document in found]


async def _logs(database: MongoDatabase, episodes: Sequence[StoredEpisode]) -> Mapping[str, Log]:
    """Id -> the valid part of its log, as far as it is there."""
    logs: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    if not episodes:
        return logs
    ranges = [log_range(episode.generation, 0, episode.chunks) for episode in episodes]
    async for document in database.chunks.find({"$or": ranges}):
        logs[document["episode"]].append(document)
    for log in logs.values():
        log.sort(key=lambda document: document["seq"])
    return logs


def _trajectories(episodes: Sequence[StoredEpisode], logs: Mapping[str, Log]) -> list[Trajectory]:
    return [_trajectory(episode, logs[episode.header.id]) for episode in episodes]


def _trajectory(episode: StoredEpisode, log: Log) -> Trajectory:
    header = episode.header
    try:
        replayed = replay(header.id, log)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise DamagedError(f"a part of episode {header.id!r} is damaged: {describe(error)}") from error
    if len(replayed.nodes) != header.nodes:
        raise DamagedError(
            f"trajectory {header.id!r} has {len(replayed.nodes)} of {header.nodes} nodes; restore a backup"
        )
    if episode.open:
        return so_far(replayed.start, replayed.nodes, replayed.head, header.finished)
    if replayed.end is None:
        raise DamagedError(f"the end of trajectory {header.id!r} is missing; restore a backup")
    return whole(replayed.start, replayed.nodes, replayed.end)


_MOST = 1000
_WATCHED = 256
_MOST_GAPS = 256
_PATIENCE = 60
"""Seconds after which a number that was taken is not waited for any more: its writer has died, or wasted it."""
_CURSOR = re.compile(
    r"e(\d{1,18})\.s(\d{1,18})\.l(\d{1,18})\.o((?:\d{1,18}:\d{1,18},)*)(?:\.g((?:[esl]\d{1,18}:\d{1,18},)*))?"
)

Gaps = dict[int, int]
"""Number -> when it was first missed, in Unix seconds."""


class _New(NamedTuple):
    """Documents with a later number, or with one that was missing; and the numbers that are missing now."""

    documents: list[dict[str, Any]]
    gaps: Gaps
    more: bool


async def store_changes(database: MongoDatabase, cursor: str | None) -> StoreChanges:
    """What happened since."""
    after, watched, known_gaps = _read(cursor)
    open_now, numbers = await _open_now(database), await last_numbers(database)
    fields = {"order": 1, "open": 1, "chunks": 1}
    sources = (
        ("e", database.episodes, "order", fields),
        ("s", database.scores, "_id", {"episode": 1}),
        ("l", database.labels, "order", {"order": 1, "episode": 1}),
    )
    new = {
        kind: await _later(collection, number, seen, last, known_gaps.get(kind, {}), shown)
        for (kind, collection, number, shown), seen, last in zip(sources, after, numbers, strict=True)
    }
    gaps = "".join(f"{kind}{at}:{since}," for kind, each in new.items() for at, since in each.gaps.items())
    following = f"e{numbers[0]}.s{numbers[1]}.l{numbers[2]}.o{open_now}{f'.g{gaps}' if gaps else ''}"
    if cursor is None:
        return StoreChanges(cursor=following)
    open_ones = {"order": {"$in": list(watched)}}
    known = await database.episodes.find(open_ones, fields).to_list() if watched else []
    episodes = new["e"].documents
    return StoreChanges(
        cursor=following,
        began=tuple(each["_id"] for each in episodes if each["open"]),
        grew=tuple(each["_id"] for each in known if each["open"] and each["chunks"] != watched[each["order"]]),
        ended=tuple(each["_id"] for each in (*known, *episodes) if not each["open"]),
        gone=len(watched) - len(known),
        scored=tuple(dict.fromkeys(each["episode"] for each in new["s"].documents)),
        labelled=tuple(dict.fromkeys(each["episode"] for each in new["l"].documents)),
        more=any(each.more for each in new.values()),
    )


async def stored_revision(database: MongoDatabase, trajectory_id: str | None) -> str:
    """A text that is another one when the episode, or anything in the store, has changed."""
    if trajectory_id is None:
        total: Query = {"_id": None, "count": {"$sum": 1}, "chunks": {"$sum": "$chunks"}}
        found = await (await database.episodes.aggregate([{"$match": {"open": True}}, {"$group": total}])).to_list()
        # A number is taken before what it numbers is written.
        collections = (database.episodes, database.scores, database.labels)
        written = [await each.estimated_document_count() for each in collections]
        return f"{await last_numbers(database)} {written} {[(each['count'], each['chunks']) for each in found]}"
    fields = {"generation": 1, "chunks": 1, "open": 1, "scored": 1}
    episode = await database.episodes.find_one({"_id": trajectory_id}, fields)
    scores = await database.scores.count_documents({"episode": trajectory_id})
    labels = await database.labels.count_documents({"episode": trajectory_id})
    return f"{episode} {scores} {labels}"


async def last_numbers(database: MongoDatabase) -> tuple[int, int, int]:
    """The numbers of episodes, scores and labels that were taken last."""
    found = {each["_id"]: each.get("value", 0) async for each in database.counters.find()}
    return found.get("episodes", 0), found.get("scores", 0), found.get("labels", 0)


def _read(cursor: str | None) -> tuple[Sequence[int | None], dict[int, int], dict[str, Gaps]]:
    """The last numbers of episodes, scores and labels; what was open; the gaps of each."""
    if cursor is None:
        return (None, None, None), {}, {}
    if (found := _CURSOR.fullmatch(cursor)) is None:
        raise cursor_lost()
    pairs = (each.split(":") for each in found[4].split(",") if each)
    gaps: dict[str, Gaps] = {}
    for each in (found[5] or "").split(","):
        if each:
            number, since = each[1:].split(":")
            gaps.setdefault(each[0], {})[int(number)] = int(since)
    return (int(found[1]), int(found[2]), int(found[3])), {int(order): int(chunks) for order, chunks in pairs}, gaps


async def _open_now(database: MongoDatabase) -> str:
    """The newest open episodes, as the cursor has them."""
    fields = {"order": 1, "chunks": 1}
    watched = await database.episodes.find({"open": True}, fields).sort("order", -1).limit(_WATCHED).to_list()
    return "".join(f"{each['order']}:{each['chunks']}," for each in watched)


async def _later(
    documents: Documents, number: str, seen: int | None, last: int, known: Mapping[int, int], fields: Query
) -> _New:
    """``seen``: the last number of the cursor, ``None`` for the first one; ``last``: of those taken before it looks."""
    found: list[dict[str, Any]] = []
    if seen is not None:
        later: Query = {number: {"$gt": seen}}
        query = {"$or": [later, {number: {"$in": list(known)}}]} if known else later
        found = await documents.find(query, fields).sort(number, 1).limit(_MOST + 1).to_list()
    lowest = max(0, last - _MOST_GAPS, seen or 0)
    present: Collection[int] = {each[number] for each in found}
    if seen is None or len(found) > _MOST:
        present = {each[number] async for each in documents.find({number: {"$gt": lowest}}, {number: 1})}
    now = int(time.time())
    missing = {at: known.get(at, now) for at in (*known, *range(lowest + 1, last + 1)) if at not in present}
    gaps = {at: since for at, since in missing.items() if now - since < _PATIENCE}
    return _New(found[:_MOST], dict(list(gaps.items())[-_MOST_GAPS:]), len(found) > _MOST)
