"""The MongoDB storage when writers are killed and servers go away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import pytest
from die_at import play
from mongodb_server import MongoServer
from pymongo.database import Database

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.testing import sample_episode, steps_of
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage

pytestmark = pytest.mark.contract

HERE = Path(__file__).parent
PASSWORD = "Tr0ub4dor+3"

# Episode -> before which step of the writer its process is killed, and how many nodes can be read then.
DEATHS = {
    "begin, nothing valid": ("insert_one", 1, None),
    "grow, nothing valid": ("update_one", 2, 3),
    "end, nothing valid": ("update_one", 4, 6),
    "add, the old one valid": ("update_one", 2, 3),
    "add, the old one there": ("delete_many", 1, 6),
}


async def killed(url: str, database: str, identity: str) -> int:
    """Let a process be killed and return how many nodes it was promised to keep."""
    method, nth, _ = DEATHS[identity]
    adds = ["add"] if identity.startswith("add") else []
    arguments = [str(HERE / "die_at.py"), url, database, identity, method, str(nth), *adds]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == -9
    return int((printed.split() or [b"0"])[-1])


async def test_a_killed_writer_leaves_what_was_acknowledged(
    mongodb: MongoServer, database: Database[dict[str, object]]
) -> None:
    promised = await asyncio.gather(*(killed(mongodb.url, database.name, identity) for identity in DEATHS))
    async with MongoDBTrajectoryStorage(mongodb.url, database.name) as storage:
        found = {each.id: each async for each, _ in storage.find(TrajectoryFilter(finished=None))}
        for (identity, (_, _, nodes)), kept in zip(DEATHS.items(), promised, strict=True):
            sample = sample_episode(identity)
            assert (len(found[identity].nodes) if identity in found else None) == nodes
            assert (nodes or 0) >= kept
            if nodes is not None:
                assert [node.message for node in found[identity].nodes] == [
                    node.message for node in sample.nodes[:nodes]
                ]
            # The next process goes on.
            for step in steps_of(sample):
                await play(storage, step)
            assert await storage.get(identity) == (sample, ())


UNCONFIRMED = {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}}


@pytest.mark.parametrize(
    ("command", "how"),
    [("insert", UNCONFIRMED), ("update", {"errorCode": 14031}), ("findAndModify", UNCONFIRMED)],
    ids=["insert, executed", "update, not executed", "findAndModify, executed"],
)
async def test_a_step_that_failed_can_be_repeated(
    mongodb: MongoServer, database: Database[dict[str, object]], command: str, how: dict[str, object]
) -> None:
    """Whether the server had executed it or not, nothing is lost and nothing is there twice."""
    sample, whole = sample_episode("played"), sample_episode("whole", text="x")
    failed = 0
    async with MongoDBTrajectoryStorage(mongodb.url, database.name) as storage:
        calls = [*(partial(play, storage, step) for step in steps_of(sample)), partial(storage.add, whole)]
        for call in calls:
            mongodb.fail_once(command, **how)
            try:
                await call()
            except StorageError as error:
                failed += 1
                assert "timed out" in str(error) or "failCommand" in str(error) or "fail point" in str(error), error
            finally:
                mongodb.fail_no_more()
            await call()
        assert {each.id: each async for each, _ in storage.find()} == {"played": sample, "whole": whole}
    assert failed == {"findAndModify": 2, "update": len(calls) - 2}.get(command, len(calls))


@pytest.mark.slow
async def test_a_server_that_goes_away_is_an_error_and_may_come_back(mongodb: MongoServer, tmp_path: Path) -> None:
    server = MongoServer(tmp_path / "server", lasting=True)
    server.start()
    try:
        async with MongoDBTrajectoryStorage(f"{server.url}&serverSelectionTimeoutMS=1000") as storage:
            await storage.add(sample_episode("a"))
            server.stop()
            for call in (storage.add(sample_episode("b")), storage.count(), anext(storage.find())):
                started = time.monotonic()
                with pytest.raises(StorageError, match=f"MongoDB at 127.0.0.1:{server.port} (cannot be reached|broke)"):
                    await call
                assert time.monotonic() - started < 5
            server.start()
            await storage.add(sample_episode("b"))
            assert [each async for each, _ in storage.find()] == [sample_episode("a"), sample_episode("b")]
    finally:
        server.stop()


async def error_of(url: str) -> str:
    """Everything that a log could show of the failure, and its line for a person."""
    async with MongoDBTrajectoryStorage(url) as storage:
        with pytest.raises(StorageError) as raised:
            await storage.count()
    shown = "".join(traceback.format_exception(raised.value))
    assert PASSWORD not in shown
    assert PASSWORD.replace("+", "%2B") not in shown
    return str(raised.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mongodb://bob:{}@127.0.0.1:1/?serverSelectionTimeoutMS=200", "MongoDB at 127.0.0.1:1 cannot be reached"),
        ("mongodb://bob:{}@h:{}/", "the connection string of MongoDB is not valid"),
    ],
)
async def test_no_error_shows_the_password(url: str, expected: str) -> None:
    assert (await error_of(url.format(*[PASSWORD.replace("+", "%2B")] * 2))).startswith(expected)
