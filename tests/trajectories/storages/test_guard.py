"""What a storage redacts, over several calls, several storages and several processes' turns with one episode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import EpisodeGrowth, EpisodeStart, Label, LabelKind, TrajectoryFilter
from openhands_rl_plugin.core.redaction import REDACTED
from openhands_rl_plugin.core.types import JsonObject, Message, Node, Tokens
from openhands_rl_plugin.testing.storage import sample_episode
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

KEY = "ghp_" + "aB3dE5gH7jK9mN1pQ3sT5uV7wX9yZ1"
SECRET = f"the key is {KEY}"
TOOL: JsonObject = {"type": "function", "function": {"name": "bash", "description": SECRET}}
EPISODE = sample_episode("a")

Open = Callable[[], TrajectoryStorage]


@pytest.fixture(params=["file", "mongodb"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same store again and again, each time as another process would."""
    if request.param == "file":
        return lambda: FileTrajectoryStorage(tmp_path)
    mongodb, database = request.getfixturevalue("mongodb"), request.getfixturevalue("database")
    return lambda: MongoDBTrajectoryStorage(mongodb.url, database.name)


def begun(tools: tuple[JsonObject, ...] = ()) -> EpisodeStart:
    return EpisodeStart(
        id="a",
        run_id="run",
        group_id="group",
        task=EPISODE.task,
        strategy=EPISODE.strategy,
        policy=EPISODE.policy,
        tools=tools,
        started=1000.0,
    )


def grown(first: int, *texts: str) -> EpisodeGrowth:
    """A path that goes on; odd nodes are answers with token ids."""
    nodes = tuple(
        Node(
            parent=at - 1 if at else None,
            message=Message(role="assistant" if at % 2 else "user", content=text),
            sampled=bool(at % 2),
            tokens=Tokens(prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.5,)) if at % 2 else None,
        )
        for at, text in enumerate(texts, first)
    )
    return EpisodeGrowth(trajectory_id="a", first=first, nodes=nodes, head=first + len(texts) - 1)


async def trained(storage: TrajectoryStorage) -> list[int]:
    """The nodes that have token ids, after a check that no secret is stored."""
    ((trajectory, _),) = [found async for found in storage.find(TrajectoryFilter(finished=None))]
    assert KEY not in trajectory.model_dump_json()
    return [at for at, node in enumerate(trajectory.nodes) if node.tokens is not None]


@pytest.mark.parametrize("played_before", [1, 2, 3])
async def test_below_a_secret_no_ids_are_stored_whoever_goes_on(opened: Open, played_before: int) -> None:
    texts = (SECRET, "yes", "and now?", "done")
    first = opened()
    await first.begin(begun())
    await first.grow(grown(0, *texts[:played_before]))
    await first.close()
    second = opened()
    await second.grow(grown(played_before, *texts[played_before:]))
    assert await trained(second) == []
    await second.close()


async def test_a_secret_in_the_tools_holds_for_the_next_process(opened: Open) -> None:
    first = opened()
    await first.begin(begun((TOOL,)))
    await first.close()
    second = opened()
    await second.grow(grown(0, "go", "yes"))
    assert await trained(second) == []
    await second.close()


async def test_a_secret_that_another_process_stored_in_between_counts(opened: Open) -> None:
    first, second = opened(), opened()
    await first.begin(begun())
    await first.grow(grown(0, "go", "yes"))
    await second.grow(grown(2, SECRET))
    await first.grow(grown(3, "done"))
    assert await trained(first) == [1]
    await first.close()
    await second.close()


async def test_an_episode_without_secrets_keeps_its_ids_in_the_next_process(opened: Open) -> None:
    first = opened()
    await first.begin(begun())
    await first.grow(grown(0, f"this says {REDACTED} but there never was a secret", "yes"))
    await first.close()
    second = opened()
    await second.grow(grown(2, "and now?", "done"))
    assert await trained(second) == [1, 3]
    await second.close()


async def test_a_label_holds_no_secret(opened: Open) -> None:
    storage = opened()
    label = Label(id="1", trajectory_id="a", kind=LabelKind.COMMENT, text=SECRET, author="me", at=1.0)
    await storage.add_labels([label])
    assert await storage.labels(["a"]) == (label.model_copy(update={"text": f"the key is {REDACTED}"}),)
    await storage.close()
