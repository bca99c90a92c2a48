"""Looking through a store: a text, pages and changes, the same from SQLite and from MongoDB."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import (
    EpisodeGrowth,
    EpisodeStart,
    Label,
    LabelKind,
    TrajectoryFilter,
    TrajectoryOrder,
    TrajectorySummary,
)
from openhands_rl_plugin.core.types import PolicyRef, Trajectory
from openhands_rl_plugin.testing.samples import GONE, sample_episode, sample_score, steps_of, unrewarded
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage
from openhands_rl_plugin.trajectories.view import find_episode

ALL = TrajectoryFilter(finished=None)


Make = Callable[[], TrajectoryStorage]


@pytest.fixture(params=["sqlite", "mongodb"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "sqlite":
        return lambda: FileTrajectoryStorage(tmp_path)
    server, database = request.getfixturevalue("mongodb"), request.getfixturevalue("database")
    return lambda: MongoDBTrajectoryStorage(server.url, database.name)


def varied() -> Iterator[Trajectory]:
    """Episodes of which no two are alike in what is listed, with signs that patterns give a meaning to."""
    for at, text in enumerate(("a", "ab", "a*b", "a?c", "[a]", "ä", "A", "a\nb", "")):
        adapter = (None, "shop", text or None)[at % 3]
        policy = PolicyRef(base_model=f"m{at % 2}", adapter=adapter, version=(at % 4 or None) if adapter else None)
        failure = GONE if at == 4 else None
        sample = sample_episode(
            f"{text}-{at}", run=text, task=f"{text}?", policy=policy, failure=failure, reward=(at % 4) / 4, finished=at
        )
        usage = sample.usage.model_copy(update={"prompt_tokens": at * at})
        sample = sample.model_copy(update={"usage": usage})
        yield unrewarded(sample) if at == 5 else sample


@pytest.fixture(scope="module", params=["sqlite", "mongodb"])
def varied_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A store for tests that only read."""
    if request.param == "sqlite":
        folder = tmp_path_factory.mktemp("varied")
        return filled(lambda: FileTrajectoryStorage(folder))
    url = request.getfixturevalue("mongodb").url
    return filled(lambda: MongoDBTrajectoryStorage(url, "varied"))


def filled(make: Make) -> Make:
    async def fill() -> None:
        storage = make()
        for each in varied():
            await storage.add(each)
        await storage.begin(EpisodeStart.of(sample_episode("open", run="open")))
        await storage.add_scores([sample_score("a-0", 0.75), sample_score("[a]-4", 1.0)])
        await storage.close()

    asyncio.run(fill())
    return make


async def listed(storage: TrajectoryStorage, where: TrajectoryFilter) -> list[TrajectorySummary]:
    return [each async for each in storage.summaries(where)]


@pytest.mark.parametrize("order", TrajectoryOrder)
@pytest.mark.parametrize("descending", [False, True])
async def test_pages_put_together_are_the_list(varied_store: Make, order: TrajectoryOrder, descending: bool) -> None:
    storage = varied_store()
    where = ALL.model_copy(update={"sort": order, "descending": descending})
    everything = [each.id for each in await listed(storage, where)]
    found: list[str] = []
    while page := await listed(storage, where.model_copy(update={"offset": len(found), "limit": 3})):
        found += [each.id for each in page]
    assert found == everything and len(found) == 10
    await storage.close()


async def test_the_revision_is_another_one_after_each_change(make: Make) -> None:
    storage, played = make(), sample_episode("new")
    start, first = steps_of(played)[:2]
    assert isinstance(start, EpisodeStart) and isinstance(first, EpisodeGrowth)
    label = Label(id="1", trajectory_id="new", kind=LabelKind.TAG, text="x", at=1.0)
    seen = [await storage.revision()]
    for change in (
        lambda: storage.begin(EpisodeStart.of(sample_episode("open", run="open"))),
        lambda: storage.begin(start),
        lambda: storage.grow(first),
        lambda: storage.add(played),
        lambda: storage.add_scores([sample_score("new", 1.0)]),
        lambda: storage.add_labels([label]),
        lambda: storage.drop(["open"]),
    ):
        await change()
        seen.append(await make().revision())
        assert seen[-1] == await storage.revision()
    assert len(set(seen)) == 8
    await storage.close()


async def test_a_prefix_finds_an_episode(varied_store: Make) -> None:
    storage = varied_store()
    assert (await find_episode(storage, "["))[0].id == "[a]-4"
    assert (await find_episode(storage, "ab"))[0].id == "ab-1"
    with pytest.raises(StorageError, match="5 episodes"):
        await find_episode(storage, "a")
    await storage.close()
