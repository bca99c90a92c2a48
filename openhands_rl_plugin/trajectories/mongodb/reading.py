"""Every question to the episodes of a MongoDB store."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from openhands_rl_plugin.core.errors import DamagedError, describe
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectoryOrder, TrajectorySummary
from openhands_rl_plugin.core.types import Trajectory
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
from openhands_rl_plugin.trajectories.storages.documents import page_lost
from openhands_rl_plugin.trajectories.storages.header import so_far, whole

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
