"""What is written while the change feed looks is told the next time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from mongodb_server import MongoServer

from openhands_rl_plugin.core.records import EpisodeStart, Label, LabelKind
from openhands_rl_plugin.testing.samples import sample_episode, sample_score
from openhands_rl_plugin.trajectories.mongodb.client import MongoDatabase
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage

LABEL = Label(id="label", trajectory_id="old", kind=LabelKind.TAG, text="look", at=1.0)
Write = Callable[[MongoDBTrajectoryStorage], Awaitable[None]]


@pytest.mark.parametrize("from_the_beginning", [False, True])
@pytest.mark.parametrize(
    ("counter", "write", "field", "told"),
    [
        ("episodes", lambda storage: storage.add(sample_episode("late")), "ended", "late"),
        ("episodes", lambda storage: storage.begin(EpisodeStart.of(sample_episode("late"))), "began", "late"),
        ("scores", lambda storage: storage.add_scores([sample_score("old", 1.0)]), "scored", "old"),
        ("labels", lambda storage: storage.add_labels([LABEL]), "labelled", "old"),
    ],
    ids=["added", "begun", "scored", "labelled"],
)
async def test_a_writer_that_is_between_its_two_steps_is_not_passed_over(
    mongodb: MongoServer,
    database: MongoDatabase,
    monkeypatch: pytest.MonkeyPatch,
    counter: str,
    write: Write,
    field: str,
    told: str,
    from_the_beginning: bool,
) -> None:
    name = database.name
    reader, writer = MongoDBTrajectoryStorage(mongodb.url, name), MongoDBTrajectoryStorage(mongodb.url, name)
    await reader.add(sample_episode("old"))
    cursor = None if from_the_beginning else (await reader.changed_since(None)).cursor
    taken, go_on, take = asyncio.Event(), asyncio.Event(), MongoDatabase.next

    async def slowly(self: MongoDatabase, which: str, count: int = 1) -> int:
        number = await take(self, which, count)
        if which == counter:
            taken.set()
            await go_on.wait()
        return number

    monkeypatch.setattr(MongoDatabase, "next", slowly)
    writing = asyncio.create_task(write(writer))
    await asyncio.wait_for(taken.wait(), 60)
    seen, revision = await reader.changed_since(cursor), await reader.revision()
    assert not seen.any
    go_on.set()
    await writing
    following = await reader.changed_since(seen.cursor)
    assert getattr(following, field) == (told,)
    assert await reader.revision() != revision
    again = await reader.changed_since(following.cursor)
    assert not again.any, "it is told once"
    await reader.close()
    await writer.close()
