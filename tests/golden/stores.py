"""All that is read from two stores, kept as SQLite's files and MongoDB's documents.

They have whole episodes, failed ones, one stored step by step, one that never ended; scores, one withdrawn; labels.
"""

from __future__ import annotations

import asyncio
import base64
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from golden import read

from openhands_rl_plugin.apps.stores import storage_at
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rl import RLSettings, StorageSettings
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter

FILTERS: dict[str, dict[str, Any]] = {
    "finished": {},
    "all": {"finished": None},
    "unfinished": {"finished": False},
    "run": {"run_id": "run"},
    "group": {"group_id": "group-1"},
    "environment": {"environment": "grid"},
    "split": {"split": "heldout"},
    "strategy": {"strategy": "MCTS"},
    "adapter": {"adapter": "policy", "policy_version": 1},
    "failed": {"failed": True},
    "kind of failure": {"failure_kind": "infrastructure"},
    "stop": {"stop": "max_turns"},
    "good": {"reward_at_least": 0.5},
    "bad": {"reward_at_most": 0.25},
    "times": {"since": 1003.0, "until": 2000.0},
    "best first": {"sort": "reward", "descending": True},
    "most tokens": {"sort": "tokens", "descending": True, "limit": 5, "offset": 1},
    "next page": {"sort": "finished", "offset": 5, "limit": 3},
    "some": {"ids": ("episode-1", "sample", "nobody")},
}


async def contents(storage: TrajectoryStorage) -> Any:
    everything = TrajectoryFilter(finished=None)
    found = [
        (t.model_dump(mode="json"), [s.model_dump(mode="json") for s in scores])
        async for t, scores in storage.find(everything)
    ]
    asked = {name: TrajectoryFilter.model_validate(where) for name, where in FILTERS.items()}
    labels = await storage.labels([t["id"] for t, _ in found])
    return {
        "episodes": {t["id"]: {"episode": t, "scores": scores} for t, scores in found},
        "summaries": {each.id: each.model_dump(mode="json") async for each in storage.summaries(everything)},
        "found": {name: [each.id async for each in storage.summaries(where)] for name, where in asked.items()},
        "counts": {name: await storage.count(where) for name, where in asked.items()},
        "labels": [each.model_dump(mode="json") for each in labels],
    }


async def used(storage: TrajectoryStorage, use: Any) -> Any:
    try:
        return await use(storage)
    finally:
        await storage.close()


def sqlite_at(folder: str) -> TrajectoryStorage:
    return open_storage(RLSettings(storage=StorageSettings(path=folder)))


def read_sqlite() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in read("sqlite_files").items():
            (Path(folder) / name).write_bytes(base64.b64decode(text))
        return asyncio.run(used(sqlite_at(folder), contents))


@contextmanager
def mongodb() -> Iterator[tuple[TrajectoryStorage, Any]]:
    """The storage, and the database as another client sees it. Skips the test where no server can be had."""
    from mongodb_server import MongoServer, NoServerError
    from pymongo import MongoClient

    with tempfile.TemporaryDirectory() as folder:
        server = MongoServer(Path(folder) / "server")
        try:
            server.start()
        except NoServerError as error:
            import pytest

            pytest.skip(str(error))
        try:
            url = f"{server.url}&serverSelectionTimeoutMS=60000"
            with MongoClient(server.url) as client:
                yield storage_at(url.replace("/?", "/golden?")), client["golden"]
        finally:
            server.stop()


def read_mongodb() -> Any:
    from bson import json_util

    with mongodb() as (storage, database):
        for name, text in read("mongodb_documents").items():
            if documents := json_util.loads(text, json_options=json_util.CANONICAL_JSON_OPTIONS):
                database[name].insert_many(documents)
        return asyncio.run(used(storage, contents))
