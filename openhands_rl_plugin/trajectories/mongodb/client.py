"""The connection to a MongoDB server: time-outs, durability, indexes, and its errors."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from bson.errors import BSONError
from pymongo import ASCENDING, DESCENDING, AsyncMongoClient, IndexModel, ReadPreference, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import AutoReconnect, BulkWriteError, ConfigurationError, PyMongoError

from openhands_rl_plugin.core.errors import StorageError, describe

Collection = AsyncCollection[dict[str, Any]]

_REPLICATION_MS = 30_000
# What the connection string says itself is left as it is.
_TIME_OUTS = {"serverSelectionTimeoutMS": 5_000, "connectTimeoutMS": 5_000, "socketTimeoutMS": 30_000}

_REMEDIES = {
    13: "give the user the readWrite role of the database",
    18: "correct the user and the password of the connection string",
    64: "too few members of the replica set confirmed a write: start the others, or set durable=False",
    14031: "it has no space left: free some, nothing was stored",
}

_UP, _DOWN = ASCENDING, DESCENDING
_INDEXES = {
    "episodes": [
        [("order", _UP)],
        *(
            [(name, _UP), ("order", _UP)]
            for name in ("run_id", "group_id", "task_id", "split", "policy_version", "stop")
        ),
        # Unknown rewards come last in both directions, so the second one is not the first one read backwards.
        *([("unrewarded", _UP), ("reward", direction), ("order", _UP)] for direction in (_UP, _DOWN)),
        *([("finished", direction), ("order", _UP)] for direction in (_UP, _DOWN)),
    ],
    "scores": [[("episode", _UP)]],
    "labels": [[("episode", _UP)]],
}


class MongoDatabase:
    """The collections of one store. Nothing is connected before the first use.

    ``episodes`` has one small document for each episode: the fields of queries, and which of its ``chunks`` are valid;
    ``scores`` and ``labels`` have one document each; ``counters`` the last numbers, and what was done once.

    ``durable``: a write is acknowledged when a majority of the replica set has it in its journal; else when the
    primary has it in memory. A client belongs to one event loop, so a storage that is used in another one connects
    again.
    """

    def __init__(self, connection_string: str, name: str, *, durable: bool) -> None:
        self._connection_string = connection_string
        self._name = name
        # Writes without a journal are lost by a crash of the server within its commit interval (100 ms).
        self._concern = WriteConcern("majority", _REPLICATION_MS, j=True) if durable else WriteConcern(1)
        self._process = os.getpid()
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
        """Make the indexes, once; beside these, every collection has its unique index of ``_id``."""
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
        if os.getpid() != self._process:
            raise StorageError("a storage cannot be carried over a fork; open it in the process that uses it")
        try:
            yield
        except (PyMongoError, BSONError, OverflowError, UnicodeEncodeError) as error:
            cause = self._without_secrets(f"MongoDB at {self._server} {_cause(error)}")
            # No cause where its own text holds a secret or, as of many writes, all data.
            shown = not isinstance(error, BulkWriteError) and self._without_secrets(repr(error)) == repr(error)
            raise StorageError(cause) from (error if shown else None)

    def _client(self) -> AsyncMongoClient[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        if self._opened is None or self._opened[0] is not loop:
            chosen = {name.lower() for name, _ in parse_qsl(self._connection_string.partition("?")[2])}
            time_outs: dict[str, Any] = {name: ms for name, ms in _TIME_OUTS.items() if name.lower() not in chosen}
            try:
                self._opened = loop, AsyncMongoClient(self._connection_string, **time_outs)
            except (ConfigurationError, ValueError) as error:
                # Its text may quote any part of the connection string, so the password's place in it is unknown.
                raise StorageError(
                    f"the connection string of MongoDB is not valid ({type(error).__name__}); write it as "
                    "mongodb://user:password@host:27017/ with special characters of the password percent-encoded"
                ) from None
        return self._opened[1]

    @property
    def _server(self) -> str:
        """The hosts of the connection string."""
        return self._connection_string.partition("://")[2].partition("?")[0].rpartition("@")[2].partition("/")[0]

    def _without_secrets(self, text: str) -> str:
        user = urlsplit(self._connection_string).netloc.rpartition("@")[0]
        password = user.partition(":")[2]
        for secret in (self._connection_string, user, password, unquote(password)):
            text = text.replace(secret, "[redacted]") if secret else text
        return text


def _cause(error: Exception) -> str:
    code, text = getattr(error, "code", None), str(error) if isinstance(error, PyMongoError) else describe(error)
    if isinstance(error, BulkWriteError):
        first = [*error.details.get("writeErrors", ()), *error.details.get("writeConcernErrors", ()), {}][0]
        code, text = first.get("code"), first.get("errmsg", "")
    # PyMongo puts the state of every server, or the whole answer, behind the cause.
    cause = re.split(", full error:|, Topology Description:|\n", text)[0][:300]
    remedy = _REMEDIES.get(code or 0, "look at the connection string, and at the server's load, disk and log")
    return f"{'cannot be reached' if isinstance(error, AutoReconnect) else 'failed'} ({cause}); {remedy}"
