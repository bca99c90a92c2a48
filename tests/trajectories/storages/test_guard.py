"""What a storage redacts and mends, over several calls, storages and processes' turns with one episode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import EpisodeGrowth, EpisodeStart, Label, LabelKind, TrajectoryFilter
from openhands_rl_plugin.core.redaction import REDACTED
from openhands_rl_plugin.core.types import JsonObject, Message, Node, Tokens
from openhands_rl_plugin.testing import sample_episode
from openhands_rl_plugin.trajectories.mongodb.storage import MongoDBTrajectoryStorage
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

KEY = "ghp_" + "aB3dE5gH7jK9mN1pQ3sT5uV7wX9yZ1"
SECRET = f"the key is {KEY}"
HALF = "half \ud800"
TOOL: JsonObject = {"type": "function", "function": {"name": "bash", "description": SECRET}}

Open = Callable[[], TrajectoryStorage]


@pytest.fixture(params=["file", "mongodb"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same store again and again, each time as another process would."""
    if request.param == "file":
        return lambda: FileTrajectoryStorage(tmp_path)
    mongodb, database = request.getfixturevalue("mongodb"), request.getfixturevalue("database")
    return lambda: MongoDBTrajectoryStorage(mongodb.url, database.name)


def begun(tools: tuple[JsonObject, ...] = ()) -> EpisodeStart:
    return EpisodeStart.of(sample_episode("a")).model_copy(update={"tools": tools})


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
    assert all(node.message.content != HALF for node in trajectory.nodes)
    return [at for at, node in enumerate(trajectory.nodes) if node.tokens is not None]


@pytest.mark.parametrize(
    ("tools", "calls", "kept"),
    [
        ((), [(SECRET,), ("yes", "and now?", "done")], []),
        ((TOOL,), [(), ("go", "yes")], []),
        ((), [("go", "yes"), (SECRET,), (HALF,)], [1]),
    ],
    ids=["prompt", "tools", "in between"],
)
async def test_below_a_secret_no_ids_are_stored_whoever_goes_on(
    opened: Open, tools: tuple[JsonObject, ...], calls: list[tuple[str, ...]], kept: list[int]
) -> None:
    """Two processes take turns; each knows what the other one stored."""
    both, first = (opened(), opened()), 0
    await both[0].begin(begun(tools))
    for turn, texts in enumerate(calls):
        if texts:
            await both[turn % 2].grow(grown(first, *texts))
        first += len(texts)
    assert await trained(both[0]) == kept
    for storage in both:
        await storage.close()


async def test_a_label_holds_no_secret_and_no_half_of_a_surrogate_pair(opened: Open) -> None:
    storage = opened()
    label = Label(id="1", trajectory_id="a", kind=LabelKind.COMMENT, text=f"{SECRET} {HALF}", author="me", at=1.0)
    await storage.add_labels([label])
    assert await storage.labels(["a"]) == (label.model_copy(update={"text": f"the key is {REDACTED} half \ufffd"}),)
    await storage.close()
