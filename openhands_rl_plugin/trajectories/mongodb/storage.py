"""Trajectories and scores in MongoDB, for several machines that write into one store.

The log of an episode is in documents, atomic to readers without transactions, which a single server has not.

An episode has a small document in ``episodes`` and a log (``generation``) of documents in ``chunks``. Each record (the
start, some nodes with later marks, the end) is one document; MongoDB refuses one of more than 16 MB. In stores of
earlier releases a large one has several: ``part`` of ``parts``, void as soon as another record follows before the last.
What is new goes into the log first, where no reader looks; then one change of the episode's own document says how many
``chunks`` are valid. An ``_id`` is a place in a log: of two writers that take the same place the first one wins, and
the other one reads what it did.

A score comes first and then the document of its episode; in between, and as long as there is no such episode, the
score is ``pending``, for the next one that opens the store. What is numbered takes its number first: a look in between
finds a gap.

Nothing is connected before the first use. ``episodes`` has one small document for each episode: the fields of queries,
and which of its ``chunks`` are valid; ``scores`` and ``labels`` have one document each; ``counters`` the last numbers,
and what was done once.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import batched
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from pydantic import TypeAdapter

from openhands_rl_plugin.core.errors import DamagedError, StorageError, describe, from_extra
from openhands_rl_plugin.core.records import SEARCHED, NodeMark, TrajectoryFilter, TrajectoryOrder, TrajectorySummary
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.trajectories.storages.log import (
    COLUMNS,
    WATCHED,
    Content,
    Episode,
    Judged,
    Kind,
    Log,
    LogStorage,
    OvertakenError,
    Record,
    Values,
    conditions_of,
    header_of,
    json_of,
    note,
    pack_document,
    row_of,
    unpack_document,
    upgrade,
)

with from_extra("mongodb", "pymongo"):
    from bson.errors import BSONError
    from pymongo import ASCENDING, DESCENDING, AsyncMongoClient, IndexModel, ReadPreference, UpdateOne, WriteConcern
    from pymongo.asynchronous.collection import AsyncCollection
    from pymongo.errors import AutoReconnect, BulkWriteError, ConfigurationError, DuplicateKeyError, PyMongoError

Query = dict[str, Any]
Collection = AsyncCollection[dict[str, Any]]

_COMPUTED: dict[TrajectoryOrder, Query] = {
    TrajectoryOrder.TOKENS: {"$add": ["$prompt_tokens", "$completion_tokens"]},
    TrajectoryOrder.SECONDS: {"$subtract": ["$finished", "$started"]},
}
_NUMBERS: dict[Kind, str] = {"scores": "_id", "labels": "order"}
_SIGNS = {"=": "$eq", ">=": "$gte", "<=": "$lte"}
_MARKS = TypeAdapter(tuple[NodeMark, ...])
_DUPLICATE_KEY = 11000
_UPGRADED = {"_id": "found by labels"}
# An episode that is replaced while it is read is read again; that happens to it once.
_ATTEMPTS = 5

_REPLICATION_MS = 30_000
# What the connection string says itself is left as it is.
_TIME_OUTS = {"serverSelectionTimeoutMS": 5_000, "connectTimeoutMS": 5_000, "socketTimeoutMS": 30_000}

_UP, _DOWN = ASCENDING, DESCENDING
_INDEXES = {
    "episodes": [
        [("order", _UP)],
        *(
            [(name, _UP), ("order", _UP)]
            for name in ("run_id", "group_id", "task_id", "split", "policy_version", "stop", "names")
        ),
        # Unknown rewards come last in both directions, so the second one is not the first one read backwards.
        *([("unrewarded", _UP), ("reward", direction), ("order", _UP)] for direction in (_UP, _DOWN)),
        *([("finished", direction), ("order", _UP)] for direction in (_UP, _DOWN)),
    ],
    "scores": [[("episode", _UP)]],
    "labels": [[("episode", _UP)]],
}


class MongoLog(Log):
    """As in ``Log``, in the collections of one database.

    ``durable``: a write is acknowledged when a majority of the replica set has it in its journal; else when the
    primary has it in memory. A client belongs to one event loop, so a storage that is used in another one connects
    again.
    """

    def __init__(self, connection_string: str, name: str, *, durable: bool) -> None:
        self._connection_string = connection_string
        self._name = name
        # Writes without a journal are lost by a crash of the server within its commit interval (100 ms).
        self._concern = WriteConcern("majority", _REPLICATION_MS, j=True) if durable else WriteConcern(1)
        self._opened: tuple[asyncio.AbstractEventLoop, AsyncMongoClient[dict[str, Any]]] | None = None
        self._prepared = False

    def __getitem__(self, collection: str) -> Collection:
        # Ids are looked up at the primary, whatever the connection string prefers.
        database = self._client().get_database(
            self._name, write_concern=self._concern, read_preference=ReadPreference.PRIMARY
        )
        return database[collection]

    async def next(self, counter: str, count: int = 1) -> int:
        """The first of ``count`` consecutive numbers that no other process gets, larger than all before."""
        found = await self["counters"].find_one_and_update(
            {"_id": counter}, {"$inc": {"value": count}}, upsert=True, return_document=True
        )
        assert found is not None  # It is made when it is not there.
        return found["value"] - count + 1

    async def prepare(self) -> None:
        """Create the indexes, once. Every collection also has its unique index of ``_id``."""
        if not self._prepared:
            for name, indexes in _INDEXES.items():
                await self[name].create_indexes([IndexModel(keys) for keys in indexes])
            await self["scores"].create_indexes([IndexModel("pending", sparse=True)])
            self._prepared = True

    async def close(self) -> None:
        """Disconnect. The next use connects again."""
        opened, self._opened = self._opened, None
        self._prepared = False
        if opened is not None and opened[0] is asyncio.get_running_loop():
            await opened[1].close()

    @asynccontextmanager
    async def explained(self) -> AsyncIterator[None]:
        """Turn errors of the server into a ``StorageError`` with the remedy, without any password."""
        try:
            yield
        except (PyMongoError, BSONError, OverflowError, UnicodeEncodeError) as error:
            user, _, server = urlsplit(self._connection_string).netloc.rpartition("@")
            cause, password = f"MongoDB at {server} {_cause(error)}", user.partition(":")[2]
            for secret in filter(None, (password, unquote(password))):
                cause = cause.replace(secret, "[redacted]")
            # The error's own text may hold the password or, as of many writes, all data.
            raise StorageError(cause) from None

    def _client(self) -> AsyncMongoClient[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        if self._opened is None or self._opened[0] is not loop:
            given = self._connection_string.lower()
            time_outs: dict[str, Any] = {name: ms for name, ms in _TIME_OUTS.items() if name.lower() not in given}
            try:
                self._opened = loop, AsyncMongoClient(self._connection_string, **time_outs)
            except (ConfigurationError, ValueError) as error:
                # Its text may quote any part of the connection string, so the password's place in it is unknown.
                raise StorageError(
                    f"the connection string of MongoDB is not valid ({type(error).__name__}); write it as "
                    "mongodb://user:password@host:27017/ with special characters of the password percent-encoded"
                ) from None
        return self._opened[1]

    async def ids(self, where: TrajectoryFilter) -> Sequence[str]:
        if where.limit == 0:
            return []
        computed = [{"$addFields": {where.sort.value: _COMPUTED[where.sort]}}] if where.sort in _COMPUTED else []
        stages: list[Query] = [{"$match": _query_of(where)}, *computed]
        direction = -1 if where.descending else 1
        order = {} if where.sort is TrajectoryOrder.STORED else {where.sort.value: direction, "order": 1}
        first = {"unrewarded": 1} if where.sort is TrajectoryOrder.REWARD else {}
        stages += [{"$sort": {**first, **order} or {"order": direction}}, {"$skip": where.offset}]
        stages += [{"$limit": where.limit}] if where.limit else []
        found = await self["episodes"].aggregate([*stages, {"$project": {"_id": 1}}], allowDiskUse=True)
        return [document["_id"] async for document in found]

    async def count(self, where: TrajectoryFilter) -> int:
        return await self["episodes"].count_documents(_query_of(where))

    async def headers(self, ids: Sequence[str]) -> list[Episode]:
        found = self["episodes"].find({"_id": {"$in": list(ids)}})
        return [
            Episode(header_of([each["_id"], *map(each.get, COLUMNS[1:])], each["score"]), each["order"], length, place)
            async for each in found
            for length in [each["chunks"]]
            for place in [_Place(each["generation"], length)]
        ]

    async def episodes(self, ids: Sequence[str], *, unseen: bool = False) -> list[Episode]:
        read: dict[str, Episode] = {}
        missing = list(ids)
        for _ in range(_ATTEMPTS):
            known = await self.headers(missing)
            ends = [None if unseen and each.header.open else each.revision for each in known]
            ranges = [_range(each.place.generation, 0, end) for each, end in zip(known, ends, strict=True)]
            logs = defaultdict[str, list[Mapping[str, Any]]](list)
            found = self["chunks"].find({"$or": ranges}).sort("_id", 1)
            for document in await found.to_list() if ranges else ():
                logs[document["episode"]].append(document)
            read |= {each.header.id: _with_content(each, logs[each.header.id]) for each in known}
            missing = [each.header.id for each in known if len(logs[each.header.id]) < each.revision]
            if not missing:
                break
        return list(read.values())

    async def write(self, before: Episode | None, header: TrajectorySummary, content: Content) -> Episode:
        chunks = self["chunks"]
        place = before.place if before is not None and content.start is None else _Place(uuid.uuid4().hex, 0)
        documents = _documents(header.id, place, content)
        length = place.length + len(documents)
        try:
            await chunks.insert_many(documents)
        except BulkWriteError as error:
            if {each["code"] for each in error.details["writeErrors"]} == {_DUPLICATE_KEY}:
                raise OvertakenError(header.id) from None
            raise
        state = Episode(header, 0, length, place=_Place(place.generation, length))
        if await self._visible(before, header, state):
            if before is not None and place.generation != before.place.generation:
                await chunks.delete_many(_range(before.place.generation))
            return state
        now = await self["episodes"].find_one({"_id": header.id, "generation": place.generation})
        if now is None or now["chunks"] < length:
            # Closed or gone, so what comes after the valid part will not be read any more.
            await chunks.delete_many(_range(place.generation, place.length))
        raise OvertakenError(header.id)

    async def _visible(self, before: Episode | None, header: TrajectorySummary, state: Episode) -> bool:
        """Make the episode's own document this one, unless another writer was faster."""
        episodes, reward = self["episodes"], _reward(header.episode_return)
        row = {name: value for name, value in row_of(header).items() if name != "id"}
        row |= {"generation": state.place.generation, "chunks": state.revision, "open": header.open}
        if before is None:
            number = await self.next("episodes")
            try:
                await episodes.insert_one(
                    {"_id": header.id, "order": number, **row, "scored": 0, "score": None, **reward}
                )
            except DuplicateKeyError:
                return False
            return True
        where: Query = {"_id": header.id, "generation": before.place.generation, "open": True}
        where["chunks"] = {"$lte": before.place.length}
        # A judgement that it has still decides what it is found by, unless it failed.
        decides = header.failure is not None or {"$eq": ["$score", None]}
        found = await episodes.update_one(where, [{"$set": _literal(row) | _chosen(decides, reward)}])
        return found.matched_count == 1

    async def drop(self, episode: Episode) -> bool:
        identity, generation = episode.header.id, episode.place.generation
        where = {"_id": identity, "generation": generation, "open": True}
        if (await self["episodes"].delete_one(where)).deleted_count == 0:
            return False
        await self["chunks"].delete_many(_range(generation))
        for name in ("scores", "labels"):
            await self[name].delete_many({"episode": identity})
        return True

    async def add(self, values: Values, packed: Sequence[bytes]) -> None:
        kind = "scores" if isinstance(values[0], Score) else "labels"
        first = await self.next(kind, len(values))
        changes: list[UpdateOne] = []
        for number, (value, document) in enumerate(zip(values, packed, strict=True), first):
            row: Query = {"episode": value.trajectory_id, kind[:-1]: document}
            row |= {"reward": value.reward, "pending": True} if isinstance(value, Score) else {"order": number}
            identity = number if isinstance(value, Score) else value.id
            changes.append(UpdateOne({"_id": identity}, {"$setOnInsert": row}, upsert=True))
        await self[kind].bulk_write(changes)

    async def records(self, kind: Kind, ids: Sequence[str]) -> list[Record]:
        number = _NUMBERS[kind]
        # So many ids for one query: a document may have 16 MB.
        asked = [self[kind].find({"episode": {"$in": list(some)}}) for some in batched(ids, 500)]
        return sorted([(each[number], each["episode"], each[kind[:-1]]) for found in asked async for each in found])

    async def judge(self, judged: Sequence[Judged]) -> None:
        changes: list[UpdateOne] = []
        for episode, numbers, newest in judged:
            reward, header = newest and newest.reward, episode.header
            found_by = _reward(header.episode_return if newest is None else newest.reward)
            valid = {"$eq": ["$failure_kind", None]}
            last = max(numbers, default=0)
            change = _literal({"scored": last, "score": reward}) | _chosen(valid, found_by)
            if not header.open:
                change |= _literal({"turns": header.turns, "episode_return": header.episode_return})
            where: Query = {"_id": header.id} | ({"scored": {"$lte": last}} if numbers else {})
            changes.append(UpdateOne(where, [{"$set": change}]))
        await self["episodes"].bulk_write(changes, ordered=False)
        settled = [number for _, numbers, _ in judged for number in numbers]
        await self["scores"].update_many({"_id": {"$in": settled}}, {"$unset": {"pending": ""}})

    async def name(self, episode: Episode, names: Sequence[str], seen: int) -> None:
        # Unless another writer has seen more of them.
        where = {"_id": episode.header.id, "named": {"$not": {"$gt": seen}}}
        await self["episodes"].update_one(where, {"$set": {"names": list(names), "named": seen}})

    async def state(self) -> str:
        # A number is given before its document is there, so both are looked at.
        given = [(each["_id"], each.get("value")) async for each in self["counters"].find()]
        there = [await self[name].estimated_document_count() for name in ("episodes", "scores", "labels")]
        found = self["episodes"].find({"open": True}, {"chunks": 1}).sort("order", -1).limit(WATCHED)
        return f"{sorted(given)} {there} {[tuple(each.values()) async for each in found]}"


class MongoDBTrajectoryStorage(LogStorage):
    """The database ``database_name`` of a MongoDB server (4.2 or later), which several machines may share.

    A call that writes returns when a majority of the replica set has the record in its journal (write concern
    ``majority`` with ``j``), so an acknowledged record survives a crash of the server, and half a record is never read.
    With ``durable=False`` it returns when the primary has it in memory (``w=1``): a crash of the server loses the last
    0.1 s, and a change of the primary what was not replicated yet.

    A server that is away is a ``StorageError`` after five seconds (``serverSelectionTimeoutMS``; the connection string
    may say otherwise). No error shows the password that is in the connection string.
    """

    def __init__(
        self,
        connection_string: str = "mongodb://localhost:27017/",
        database_name: str = "openhands_rl",
        durable: bool = True,
    ) -> None:
        super().__init__()
        self._log = MongoLog(connection_string, database_name, durable=durable)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._upgraded = False

    async def close(self) -> None:
        """Disconnect. The storage can be used again; it then connects again."""
        await self._log.close()

    async def _read[Answer](self, work: Callable[[Log], Coroutine[Any, Any, Answer]]) -> Answer:
        self._check_process()
        async with self._log.explained():
            counters = self._log["counters"]
            if not self._upgraded:
                if not await counters.find_one(_UPGRADED):
                    await upgrade(self._log)
                    await counters.update_one(_UPGRADED, {"$set": {"value": 1}}, upsert=True)
                # A writer may have died between a score and the document of its episode.
                pending = self._log["scores"].find({"pending": True}, {"episode": 1})
                await note(self._log, {each["episode"] async for each in pending}, ["scores"])
                self._upgraded = True
            return await work(self._log)

    async def _change[Answer](self, identity: str, work: Callable[[Log], Coroutine[Any, Any, Answer]]) -> Answer:
        self._check_process()
        async with self._log.explained(), self._turns.setdefault(identity, asyncio.Lock()):
            await self._log.prepare()
            return await work(self._log)


def _cause(error: Exception) -> str:
    text = str(error) if isinstance(error, PyMongoError) else describe(error)
    if isinstance(error, BulkWriteError):
        text = [*error.details.get("writeErrors", ()), *error.details.get("writeConcernErrors", ()), {}][0].get(
            "errmsg", ""
        )
    # PyMongo puts the state of every server, or the whole answer, behind the cause.
    cause = re.split(", full error:|, Topology Description:|\n", text)[0][:300]
    failed = "cannot be reached" if isinstance(error, AutoReconnect) else "failed"
    return f"{failed} ({cause}); look at the connection string, and at the server's load, disk and log"


class _Place(NamedTuple):
    """The place of an episode's content: its log, and the number of documents there, valid or not."""

    generation: str
    length: int


def _query_of(where: TrajectoryFilter) -> Query:
    query: Query = defaultdict(dict)
    for name, sign, value in conditions_of(where):
        query[name][_SIGNS[sign]] = value
    if "reward" in query:
        query["unrewarded"] = False  # The index begins with whether the reward is known.
    if where.label is not None:
        query["names"] = where.label
    if where.ids is not None:
        query["_id"] = {"$in": list(where.ids)}
    if where.finished is not None:
        query["open"] = not where.finished
    if where.failed is not None:
        # Combined with the filter's own kind.
        query["$and"] = [{"failure_kind": {"$ne": None} if where.failed else None}]
    if where.contains is not None:
        # The server takes no NUL in a pattern.
        pattern = re.escape(where.contains).replace("\0", r"\x00")
        query["$or"] = [{"_id" if name == "id" else name: {"$regex": pattern}} for name in SEARCHED]
    return dict(query)


def _reward(value: float | None) -> Query:
    """The reward of filters and sorting."""
    return {"reward": value, "unrewarded": value is None}


def _literal(values: Query) -> Query:
    """Quote values for a pipeline, where a text that begins with a dollar sign names a field."""
    return {name: {"$literal": value} for name, value in values.items()}


def _chosen(condition: Any, values: Query) -> Query:
    return {name: {"$cond": [condition, {"$literal": value}, f"${name}"]} for name, value in values.items()}


def _range(generation: str, first: int = 0, end: int | None = None) -> Query:
    """The query for the documents from ``first`` to before ``end``, or to the last."""
    # "0" comes right after "/".
    until = f"{generation}0" if end is None else f"{generation}/{end:08d}"
    return {"_id": {"$gte": f"{generation}/{first:08d}", "$lt": until}}


def _documents(episode: str, place: _Place, content: Content) -> list[Query]:
    """The records of ``content`` as documents, of which the first takes the next place in the log."""
    records: list[Query] = []
    if content.start is not None:
        records.append({"kind": "start", "data": content.start})
    if content.packs or content.marks or content.start is content.end is None:
        marks = pack_document(b"[%s]" % b",".join(map(json_of, content.marks))) if content.marks else b""
        # Earlier releases wrote several packs of a growth, of which the last one closed it.
        growth = {"kind": "growth", "data": b"".join(content.packs), "closes": True}
        records.append({**growth, "head": content.head, "marks": marks})
    if content.end is not None:
        records.append({"kind": "end", "data": content.end})
    # Earlier releases wrote a large record in several parts.
    row = {"episode": episode, "closes": False, "head": None, "marks": b"", "part": 0, "parts": 1}
    places = enumerate(records, place.length)
    return [{"_id": f"{place.generation}/{seq:08d}", "seq": seq, **row, **record} for seq, record in places]


def _with_content(episode: Episode, documents: Sequence[Mapping[str, Any]]) -> Episode:
    """The episode with the content of its log."""
    missing = f"a part of episode {episode.header.id!r} is missing; restore the database from a backup"
    start: bytes | None = None
    end: bytes | None = None
    head: int | None = None
    packs: list[bytes] = []
    marks: list[NodeMark] = []
    parts: list[bytes] = []
    damage = missing if len(documents) < episode.revision else ""
    try:
        for at, document in enumerate(documents):
            # A first part makes void what came before it without its last part.
            parts = [*(parts if document["part"] else ()), document["data"]]
            if document["seq"] != at or document["part"] != len(parts) - 1:
                raise DamagedError(missing)
            if len(parts) < document["parts"]:
                continue
            data = b"".join(parts)
            if document["kind"] == "start":
                start = data
            elif document["kind"] == "end":
                end = data
            else:
                packs += [data] if data else []
                marks += _MARKS.validate_json(unpack_document(document["marks"])) if document["marks"] else ()
                head = document["head"] if document["closes"] else head
    except DamagedError as error:
        damage = str(error)
    except (KeyError, ValueError, TypeError) as error:
        damage = f"a part of episode {episode.header.id!r} is damaged: {describe(error)}"
    place = _Place(episode.place.generation, len(documents))
    return episode._replace(content=Content(start, packs, marks, head, end), place=place, damage=damage)
