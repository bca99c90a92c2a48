"""The connection to a MongoDB server: time-outs, durability, indexes, and its errors."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from bson.errors import BSONError
from pymongo import ASCENDING, DESCENDING, AsyncMongoClient, IndexModel, ReadPreference, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConfigurationError,
    DocumentTooLarge,
    ExecutionTimeout,
    NetworkTimeout,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WTimeoutError,
)

from openhands_rl_plugin.core.errors import StorageError, describe

Collection = AsyncCollection[dict[str, Any]]

_REPLICATION_MS = 30_000
# What the connection string says itself is left as it is.
_TIME_OUTS = {"serverSelectionTimeoutMS": 5_000, "connectTimeoutMS": 5_000, "socketTimeoutMS": 30_000}

_UNAUTHORIZED, _AUTHENTICATION_FAILED = 13, 18
_TOO_FEW_CONFIRMED = 64
_NO_SPACE = 14031

_UP, _DOWN = ASCENDING, DESCENDING
_EPISODE_INDEXES = (
    [("order", _UP)],
    [("run_id", _UP), ("order", _UP)],
    [("group_id", _UP), ("order", _UP)],
    [("task_id", _UP), ("order", _UP)],
    # Unknown rewards come last in both directions, so the second one is not the first one read backwards.
    [("unrewarded", _UP), ("reward", _UP), ("order", _UP)],
    [("unrewarded", _UP), ("reward", _DOWN), ("order", _UP)],
    [("finished", _UP), ("order", _UP)],
    [("finished", _DOWN), ("order", _UP)],
)


class _Opened(NamedTuple):
    """A client and its event loop's other objects."""

    loop: asyncio.AbstractEventLoop
    client: AsyncMongoClient[dict[str, Any]]
    preparing: asyncio.Lock


class MongoDatabase:
    """The collections of one store. Nothing is connected before the first use.

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
        self._opened: _Opened | None = None
        self._prepared = False

    @property
    def episodes(self) -> Collection:
        """One small document for each episode: the fields of queries, and which of its chunks are valid."""
        return self._database["episodes"]

    @property
    def chunks(self) -> Collection:
        """The parts of episodes, in the order of writing."""
        return self._database["chunks"]

    @property
    def scores(self) -> Collection:
        """One document for each judgement; ``_id`` counts them."""
        return self._database["scores"]

    @property
    def labels(self) -> Collection:
        """One document for each label."""
        return self._database["labels"]

    @property
    def counters(self) -> Collection:
        """The last number of each kind, and what was done once."""
        return self._database["counters"]

    async def next(self, counter: str, count: int = 1) -> int:
        """The first of ``count`` consecutive numbers that no other process gets, larger than all before."""
        found = await self.counters.find_one_and_update(
            {"_id": counter}, {"$inc": {"value": count}}, upsert=True, return_document=True
        )
        assert found is not None  # It is made when it is not there.
        return found["value"] - count + 1

    async def prepare(self) -> bool:
        """Make the indexes, which exist from then on; true when this was the first call."""
        if self._prepared:
            return False
        async with self._connected().preparing:
            if self._prepared:
                return False
            await self.episodes.create_indexes([IndexModel(keys) for keys in _EPISODE_INDEXES])
            # Beside these, every collection has its unique index of ``_id``.
            await self.chunks.create_indexes([IndexModel("pending", sparse=True)])
            await self.scores.create_indexes([IndexModel("episode"), IndexModel("pending", sparse=True)])
            await self.labels.create_indexes([IndexModel("episode")])
            self._prepared = True
            return True

    async def close(self) -> None:
        """Disconnect. The next use connects again."""
        opened, self._opened = self._opened, None
        self._prepared = False
        if opened is not None and opened.loop is asyncio.get_running_loop():
            await opened.client.close()

    @asynccontextmanager
    async def explained(self) -> AsyncIterator[None]:
        """Turn errors of the server into a ``StorageError`` with the remedy, without any password."""
        if os.getpid() != self._process:
            raise StorageError("a storage cannot be carried over a fork; open it in the process that uses it")
        try:
            yield
        except (PyMongoError, BSONError, OverflowError, UnicodeEncodeError) as error:
            cause = _cause(error, self._server)
            raise StorageError(_without(self._secrets, cause)) from _safe(error, self._secrets)

    @property
    def _database(self) -> AsyncDatabase[dict[str, Any]]:
        # Ids are looked up at the primary, whatever the connection string prefers.
        return self._connected().client.get_database(
            self._name, write_concern=self._concern, read_preference=ReadPreference.PRIMARY
        )

    def _connected(self) -> _Opened:
        loop = asyncio.get_running_loop()
        if self._opened is None or self._opened.loop is not loop:
            _let_resolve(loop)
            try:
                client = AsyncMongoClient(self._connection_string, **self._time_outs)
            except (ConfigurationError, ValueError) as error:
                # Its text may quote any part of the connection string, so the password's place in it is unknown.
                raise StorageError(
                    f"the connection string of MongoDB is not valid ({type(error).__name__}); write it as "
                    "mongodb://user:password@host:27017/ with special characters of the password percent-encoded"
                ) from None
            self._opened = _Opened(loop, client, asyncio.Lock())
        return self._opened

    @property
    def _time_outs(self) -> dict[str, Any]:
        said = {name.lower() for name, _ in parse_qsl(self._connection_string.partition("?")[2])}
        return {name: value for name, value in _TIME_OUTS.items() if name.lower() not in said}

    @property
    def _server(self) -> str:
        """The hosts of the connection string."""
        return self._connection_string.partition("://")[2].partition("?")[0].rpartition("@")[2].partition("/")[0]

    @property
    def _secrets(self) -> frozenset[str]:
        user = urlsplit(self._connection_string).netloc.rpartition("@")[0]
        password = user.partition(":")[2]
        return frozenset({self._connection_string, user, password, unquote(password)} - {""})


def _let_resolve(loop: asyncio.AbstractEventLoop) -> None:
    """Event loops look up host names in threads, which are not to be had once the interpreter shuts down.

    That is when a last episode may be saved; its loop has nothing else to do and looks names up itself.
    """

    async def look_up(host: str, port: int, **kwargs: Any) -> Any:
        return socket.getaddrinfo(host, port, **kwargs)

    with ThreadPoolExecutor(max_workers=1) as trial:
        try:
            trial.submit(int)
        except RuntimeError:
            setattr(loop, "getaddrinfo", look_up)  # noqa: B010


def _cause(error: Exception, server: str) -> str:
    where = f"MongoDB at {server}"
    code, text = _said(error)
    if isinstance(error, ServerSelectionTimeoutError):
        return f"{where} cannot be reached ({text}); start the server, or correct the connection string"
    if isinstance(error, NetworkTimeout | ExecutionTimeout):
        return f"{where} did not answer in time ({text}); look at the server's load and the network"
    if isinstance(error, AutoReconnect):
        return f"{where} broke the connection ({text}); try again when the server is back"
    if isinstance(error, WTimeoutError) or code == _TOO_FEW_CONFIRMED:
        return f"{where}: too few members of the replica set confirmed a write; start the others, or set durable=False"
    if code == _AUTHENTICATION_FAILED:
        return f"{where} refused the user or the password; correct the connection string"
    if code == _UNAUTHORIZED:
        return f"{where} does not allow this ({text}); give the user the readWrite role of the database"
    if code == _NO_SPACE:
        return f"{where} has no space left; free some, nothing was stored"
    if isinstance(error, DocumentTooLarge):
        return f"a record is larger than MongoDB takes (16 MB): {text}; shorten its texts"
    if isinstance(error, BSONError | OverflowError | UnicodeEncodeError):
        return (
            f"a record cannot be written as BSON ({describe(error)}); numbers may have 64 bits, texts must be Unicode"
        )
    return f"{where} failed ({type(error).__name__}: {text}); look at the server's log"


def _said(error: Exception) -> tuple[int | None, str]:
    """The server's code and the first line of its message."""
    code, text = (error.code if isinstance(error, OperationFailure) else None), str(error)
    if isinstance(error, BulkWriteError):
        details = error.details
        first = [*details.get("writeErrors", ()), *details.get("writeConcernErrors", ()), {}][0]
        code, text = first.get("code"), first.get("errmsg", "")
    # PyMongo puts the state of every server, or the whole answer, behind the cause.
    cause = text.partition(", full error:")[0].partition(", Topology Description:")[0]
    return code, "".join(cause.splitlines()[:1])[:300]


def _without(secrets: frozenset[str], text: str) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "[redacted]")
    return text


def _safe(error: Exception, secrets: frozenset[str]) -> Exception | None:
    """The exception to name as the cause: none where its own text holds a secret or, as of many writes, all data."""
    if isinstance(error, BulkWriteError):
        return None
    return error if _without(secrets, repr(error)) == repr(error) else None
