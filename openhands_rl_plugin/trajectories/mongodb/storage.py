"""Trajectories and scores in MongoDB: for several machines that write into one store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakValueDictionary

from openhands_rl_plugin.core.errors import from_extra
from openhands_rl_plugin.trajectories.storages.log import Log, LogStorage, upgrade

_UPGRADED = {"_id": "found by labels"}


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
        with from_extra("mongodb", "pymongo"):
            from openhands_rl_plugin.trajectories.mongodb.log import MongoLog
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
                self._upgraded = True
            return await work(self._log)

    async def _change[Answer](self, identity: str, work: Callable[[Log], Coroutine[Any, Any, Answer]]) -> Answer:
        self._check_process()
        async with self._log.explained(), self._turns.setdefault(identity, asyncio.Lock()):
            await self._log.prepare()
            return await work(self._log)
