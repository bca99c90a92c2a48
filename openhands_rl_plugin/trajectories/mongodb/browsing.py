"""Counts over many episodes of a MongoDB store, without reading any log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openhands_rl_plugin.core.browsing.listing import FacetCount, PolicyTokens, RewardHistogram
from openhands_rl_plugin.core.browsing.terms import Column
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.trajectories.mongodb.changes import last_numbers
from openhands_rl_plugin.trajectories.mongodb.client import MongoDatabase
from openhands_rl_plugin.trajectories.mongodb.conditions import Query, field_of
from openhands_rl_plugin.trajectories.mongodb.headers import query_of


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


async def policy_tokens(database: MongoDatabase, where: TrajectoryFilter) -> tuple[PolicyTokens, ...]:
    """What the episodes of each policy took."""
    policy = {"base_model": "$base_model", "adapter": "$adapter", "version": "$policy_version"}
    sums = {name: {"$sum": f"${name}"} for name in ("prompt_tokens", "completion_tokens")}
    stages: list[Query] = [
        {"$match": query_of(where)},
        {"$group": {"_id": policy, "episodes": {"$sum": 1}, **sums}},
        {"$sort": {"_id": 1}},
    ]
    return tuple(
        [
            PolicyTokens(
                policy=PolicyRef.model_validate(each["_id"]),
                episodes=each["episodes"],
                prompt_tokens=each["prompt_tokens"],
                completion_tokens=each["completion_tokens"],
            )
            async for each in await database.episodes.aggregate(stages)
        ]
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
