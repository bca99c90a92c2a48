"""The MongoDB storage against a real server."""

from __future__ import annotations

import asyncio
import math

import pytest
from die_at import play
from mongodb_server import MongoServer
from pymongo import monitoring
from pymongo.database import Database

from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.testing import check_storage, sample_episode, sample_score, steps_of
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage

pytestmark = pytest.mark.contract

Stored = Database[dict[str, object]]


@pytest.fixture
def storage(mongodb: MongoServer, database: Stored) -> MongoDBTrajectoryStorage:
    # A loaded machine may keep the server busy for longer than users wait for one.
    return MongoDBTrajectoryStorage(f"{mongodb.url}&serverSelectionTimeoutMS=60000", database.name)


def check_tidy(database: Stored) -> None:
    """Nothing is in the logs but what the episodes' documents say."""
    episodes = {each["generation"]: each for each in database["episodes"].find()}
    chunks = list(database["chunks"].find())
    assert all(chunk["seq"] < episodes[str(chunk["_id"]).partition("/")[0]]["chunks"] for chunk in chunks)
    assert len(chunks) == sum(each["chunks"] for each in episodes.values())


async def test_it_conforms(mongodb: MongoServer, database: Stored) -> None:
    await check_storage(lambda: MongoDBTrajectoryStorage(mongodb.url, database.name))
    check_tidy(database)


@pytest.mark.parametrize(("durable", "concern"), [(True, {"w": "majority", "j": True}), (False, {"w": 1})])
async def test_writes_wait_for_the_journal_of_a_majority(
    mongodb: MongoServer, database: Stored, durable: bool, concern: dict[str, object]
) -> None:
    seen: list[dict[str, object]] = []

    class Listener(monitoring.CommandListener):
        def started(self, event: monitoring.CommandStartedEvent) -> None:
            if event.database_name == database.name and event.command_name in {"insert", "update", "findAndModify"}:
                seen.append({k: v for k, v in event.command.get("writeConcern", {"w": 1}).items() if k != "wtimeout"})

        def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...
        def failed(self, event: monitoring.CommandFailedEvent) -> None: ...

    monitoring.register(Listener())
    async with MongoDBTrajectoryStorage(mongodb.url, database.name, durable=durable) as storage:
        for step in steps_of(sample_episode("a")):
            await play(storage, step)
        await storage.add_scores([sample_score("a", 1.0)])
    assert len(seen) > 10
    assert all(each == concern for each in seen)


async def test_open_json_and_odd_texts_come_back_as_they_were(storage: MongoDBTrajectoryStorage) -> None:
    odd = {"$set": {"a.b": 10**30}, "": None, "\0": [math.pi, -0.0, 2**63], "$id": "$x", "_id": {"$ref": 1}}
    sample = sample_episode("$odd.id", run="$run", task="$$ROOT")
    task = sample.task.model_copy(update={"data": odd})
    score = sample_score(sample.id, 0.5).model_copy(update={"detail": odd})
    sample = sample.model_copy(update={"evidence": odd, "task": task})
    for step in steps_of(sample):
        await play(storage, step)
    await storage.add_scores([score])
    assert await storage.scores([*map(str, range(2000)), sample.id]) == {sample.id: (score,)}
    assert [each async for each in storage.find(TrajectoryFilter(run_id="$run", task_id="$$ROOT"))] == [
        (sample, (score,))
    ]


async def test_an_unfinished_episode_is_replaced_at_once(storage: MongoDBTrajectoryStorage, database: Stored) -> None:
    """Readers see the old state or the new one, never something between."""
    sample = sample_episode("a")
    other = sample_episode("a", text="another try")
    for step in steps_of(other)[:3]:
        await play(storage, step)
    ((before, _),) = [each async for each in storage.find(TrajectoryFilter(finished=None))]
    writing = asyncio.create_task(storage.add(sample))
    seen = []
    while not writing.done() or not seen:
        seen += [trajectory async for trajectory, _ in storage.find(TrajectoryFilter(finished=None))]
    await writing
    assert all(trajectory in (before, sample) for trajectory in seen)
    assert await storage.get("a") == (sample, ())
    check_tidy(database)


async def test_a_half_written_score_counts_and_an_earlier_release_is_judged_anew(
    storage: MongoDBTrajectoryStorage, mongodb: MongoServer, database: Stored
) -> None:
    async with MongoDBTrajectoryStorage(mongodb.url, database.name) as writer:
        for name in ("half", "graded"):
            await writer.add(sample_episode(name, reward=0.0))
        await writer.add_scores([sample_score("half", 0.25), sample_score("graded", 1.0, "tests-1")])
        await writer.add_scores([sample_score("graded", 0.25, "verifier-1@x")])
    # As it is before the episode's own document says so, and as version 0.2 left it.
    database["episodes"].update_one({"_id": "half"}, {"$set": {"scored": 0, "score": None, "reward": 0.5}})
    database["scores"].update_one({"episode": "half"}, {"$set": {"pending": True}})
    database["counters"].delete_one({"_id": "found by labels"})
    database["episodes"].update_one({"_id": "graded"}, {"$set": {"score": 0.25, "reward": 0.25, "scored": 3}})
    assert [each.reward async for each in storage.summaries(TrajectoryFilter(reward_at_least=0.2))] == [0.25, 1.0]
    assert database["scores"].count_documents({"pending": True}) == 0


async def test_the_settings_name_it(mongodb: MongoServer, database: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"storage_backend": "mongodb", "storage": {"uri_env": "SHOP_MONGODB"}}
    settings = RLSettings.model_validate(table)
    with pytest.raises(ConfigError, match=r"\[rl.storage\] uri_env: the environment variable SHOP_MONGODB is not set"):
        open_storage(settings)
    monkeypatch.setenv("SHOP_MONGODB", mongodb.url.replace("/?", f"/{database.name}?"))
    storage = open_storage(settings)
    await storage.add(sample_episode("a"))
    await storage.close()
    assert [each["_id"] for each in database["episodes"].find()] == ["a"]


async def test_one_storage_serves_several_event_loops(mongodb: MongoServer, database: Stored) -> None:
    storage = MongoDBTrajectoryStorage(mongodb.url, database.name)
    await asyncio.to_thread(asyncio.run, storage.add(sample_episode("a")))
    await storage.add(sample_episode("b"))
    assert await storage.count() == 2
    await storage.close()
