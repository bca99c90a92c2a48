"""Counts over many episodes of a MongoDB store, and what has changed, without reading any log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from openhands_rl_plugin.core.browsing.listing import FacetCount, RewardHistogram, StoreChanges
from openhands_rl_plugin.core.browsing.terms import Column
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.trajectories.mongodb.client import Collection, MongoDatabase
from openhands_rl_plugin.trajectories.mongodb.conditions import Query, field_of
from openhands_rl_plugin.trajectories.mongodb.headers import query_of
from openhands_rl_plugin.trajectories.storages.documents import cursor_lost

_MOST = 1000
_WATCHED = 256
_CURSOR = re.compile(r"e(\d{1,18})\.s(\d{1,18})\.l(\d{1,18})\.o((?:\d{1,18}:\d{1,18},)*)")


async def facet_counts(
    database: MongoDatabase, where: TrajectoryFilter, by: Sequence[Column], most: int
) -> list[tuple[FacetCount, ...]]:
    """For each column the most frequent values of the matches."""
    return [await _facet(database, query_of(where), column, most) for column in by]


async def reward_histogram(database: MongoDatabase, where: TrajectoryFilter, bins: int) -> RewardHistogram:
    """How the rewards of the matches are distributed."""
    query = query_of(where)
    unknown = await database.episodes.count_documents({"$and": [query, {"unrewarded": True}]})
    known: Query = {"$and": [query, {"unrewarded": False}]}
    ends = {"_id": None, "low": {"$min": "$reward"}, "high": {"$max": "$reward"}}
    bounds = await (await database.episodes.aggregate([{"$match": known}, {"$group": ends}])).to_list()
    if not bounds:
        return RewardHistogram(unknown=unknown)
    low, high = bounds[0]["low"], bounds[0]["high"]
    width = (high - low) / bins or 1.0
    place: Query = {"$floor": {"$divide": [{"$subtract": ["$reward", low]}, width]}}
    stages: list[Query] = [{"$match": known}, {"$group": {"_id": place, "count": {"$sum": 1}}}]
    counts = [0] * bins
    async for each in await database.episodes.aggregate(stages):
        counts[min(int(each["_id"]), bins - 1)] += each["count"]
    return RewardHistogram(low=low, high=high, counts=tuple(counts), unknown=unknown)


async def store_changes(database: MongoDatabase, cursor: str | None) -> StoreChanges:
    """What happened since. A number that is taken and not yet written when it is looked for may be passed over."""
    following = await _now(database)
    if cursor is None:
        return StoreChanges(cursor=following)
    if (found := _CURSOR.fullmatch(cursor)) is None:
        raise cursor_lost()
    pairs = (each.split(":") for each in found[4].split(",") if each)
    watched = {int(order): int(chunks) for order, chunks in pairs}
    fields = {"order": 1, "open": 1, "chunks": 1}
    new = await _later(database.episodes, "order", int(found[1]), fields)
    open_ones = {"order": {"$in": list(watched)}}
    known = await database.episodes.find(open_ones, fields).to_list() if watched else []
    scored = [each["episode"] for each in await _later(database.scores, "_id", int(found[2]), {"episode": 1})]
    labelled = [each["episode"] for each in await _later(database.labels, "order", int(found[3]), {"episode": 1})]
    return StoreChanges(
        cursor=following,
        began=tuple(each["_id"] for each in new[:_MOST] if each["open"]),
        grew=tuple(each["_id"] for each in known if each["open"] and each["chunks"] != watched[each["order"]]),
        ended=tuple(each["_id"] for each in (*known, *new[:_MOST]) if not each["open"]),
        gone=len(watched) - len(known),
        scored=tuple(dict.fromkeys(scored[:_MOST])),
        labelled=tuple(dict.fromkeys(labelled[:_MOST])),
        more=max(len(new), len(scored), len(labelled)) > _MOST,
    )


async def stored_revision(database: MongoDatabase, trajectory_id: str | None) -> str:
    """A text that is another one when the episode, or anything in the store, has changed."""
    if trajectory_id is None:
        total: Query = {"_id": None, "count": {"$sum": 1}, "chunks": {"$sum": "$chunks"}}
        found = await (await database.episodes.aggregate([{"$match": {"open": True}}, {"$group": total}])).to_list()
        return f"{await _numbers(database)} {[(each['count'], each['chunks']) for each in found]}"
    fields = {"generation": 1, "chunks": 1, "open": 1, "scored": 1}
    episode = await database.episodes.find_one({"_id": trajectory_id}, fields)
    scores = await database.scores.count_documents({"episode": trajectory_id})
    labels = await database.labels.count_documents({"episode": trajectory_id})
    return f"{episode} {scores} {labels}"


async def _facet(database: MongoDatabase, query: Query, column: Column, most: int) -> tuple[FacetCount, ...]:
    key: Any = f"${field_of(column)}"
    if column is Column.ADAPTER:
        key = {"name": "$adapter", "version": "$policy_version"}
    stages: list[Query] = [
        {"$match": query},
        {"$group": {"_id": key, "count": {"$sum": 1}}},
        {"$sort": {"count": -1, "_id": 1}},
        {"$limit": most},
    ]
    found = await database.episodes.aggregate(stages)
    return tuple([FacetCount(value=_shown(each["_id"]), count=each["count"]) async for each in found])


def _shown(value: object) -> str | None:
    if isinstance(value, dict):
        name, version = value.get("name"), value.get("version")
        return name if name is None or version is None else f"{name}@{version}"
    return None if value is None else str(value)


async def _now(database: MongoDatabase) -> str:
    fields = {"order": 1, "chunks": 1}
    watched = await database.episodes.find({"open": True}, fields).sort("order", -1).limit(_WATCHED).to_list()
    episodes, scores, labels = await _numbers(database)
    return f"e{episodes}.s{scores}.l{labels}.o{''.join(f'{each["order"]}:{each["chunks"]},' for each in watched)}"


async def _numbers(database: MongoDatabase) -> tuple[int, int, int]:
    found = {each["_id"]: each.get("value", 0) async for each in database.counters.find()}
    return found.get("episodes", 0), found.get("scores", 0), found.get("labels", 0)


async def _later(collection: Collection, number: str, after: int, fields: Query) -> list[dict[str, Any]]:
    return await collection.find({number: {"$gt": after}}, fields).sort(number, 1).limit(_MOST + 1).to_list()
