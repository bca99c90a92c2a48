"""What has changed in a MongoDB store since a cursor, without reading any log.

Episodes, scores and labels have rising numbers. A writer takes a number first and writes what it numbers afterwards, so
a look in between finds a gap. The cursor keeps the gaps of the last minute, and they are looked for again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from openhands_rl_plugin.core.records import StoreChanges
from openhands_rl_plugin.trajectories.mongodb.client import Collection as Documents
from openhands_rl_plugin.trajectories.mongodb.client import MongoDatabase
from openhands_rl_plugin.trajectories.mongodb.headers import Query
from openhands_rl_plugin.trajectories.storages.documents import cursor_lost

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
