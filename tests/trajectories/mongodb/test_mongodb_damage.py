"""A MongoDB store with damaged documents: everything else is readable, and what is lost is named."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from mongodb_server import MongoServer
from pymongo.database import Database

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.errors import DamagedError
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.testing import sample_episode, sample_score
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage

IDS = tuple(f"episode {number}" for number in range(6))
FIELDS = {"chunks": "data", "scores": "score", "labels": "label"}
"""The packed value of each collection's documents."""


async def fill(storage: MongoDBTrajectoryStorage) -> None:
    labels = [Label(id=f"of {each}", trajectory_id=each, kind=LabelKind.COMMENT, text="good", at=1.0) for each in IDS]
    for identity in IDS:
        await storage.add(sample_episode(identity, run="r"))
    await storage.add_scores([sample_score(identity, 0.25) for identity in IDS])
    await storage.add_labels(labels)


def damage(source: random.Random, database: Database[Any], collection: str, episode: str, how: str) -> None:
    """Ruin one document of an episode: flip a bit of it, or take it away."""
    found = source.choice(list(database[collection].find({"episode": episode})))
    if how == "gone":
        database[collection].delete_one({"_id": found["_id"]})
        return
    field = FIELDS[collection]
    data = bytearray(found[field])
    at = source.randrange(8 * len(data))
    data[at // 8] ^= 1 << at % 8
    database[collection].update_one({"_id": found["_id"]}, {"$set": {field: bytes(data)}})


async def test_damaged_documents_cost_what_they_hit_and_that_is_named(
    mongodb: MongoServer,
    database: Database[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, how = random.Random(1), "flipped"
    async with MongoDBTrajectoryStorage(mongodb.url, database.name) as storage:
        await fill(storage)
        whole = {found[0].id: found async for found in storage.find()}
        damage(source, database, "chunks", IDS[1], how)
        with pytest.raises(DamagedError, match=f"episode {IDS[1]}"):
            _ = [found async for found in storage.find()]
        damage(source, database, "chunks", IDS[2], "gone")
        damage(source, database, "scores", IDS[3], how)
        damage(source, database, "labels", IDS[4], how)
        with pytest.raises(DamagedError):
            await storage.labels(IDS)
        lost = storage.skip_damaged()
        for _ in range(2):
            found = {each[0].id: each async for each in storage.find()}
            labels = await storage.labels(IDS)
    hits = [("episode", IDS[1]), ("episode", IDS[2]), ("label", IDS[4]), ("score", IDS[3])]
    assert sorted((record.what, record.id) for record in lost) == hits, "each once"
    missing = f"a part of episode {IDS[2]!r} is missing; restore the database"
    assert any(missing in record.cause for record in lost)
    assert found == {**{each: whole[each] for each in (IDS[0], *IDS[4:])}, IDS[3]: (whole[IDS[3]][0], ())}
    assert [label.trajectory_id for label in labels] == [each for each in IDS if each != IDS[4]]

    monkeypatch.setenv("STORE_URI", mongodb.url.replace("/?", f"/{database.name}?"))
    for words, code in (((), 1), (("--skip-damaged",), 0)):
        assert await asyncio.to_thread(cli.main, ["doctor", "drift", "env:STORE_URI", *words]) == code
        printed = capsys.readouterr().err
        assert IDS[1] in printed and ("--skip-damaged" in printed) == (code == 1) and "Traceback" not in printed
