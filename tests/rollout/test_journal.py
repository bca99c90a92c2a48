"""Episodes that are stored while they run: nothing that was answered is lost, whenever the process dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.core.records import EpisodeGrowth, EpisodeStart, TrajectoryFilter
from openhands_rl_plugin.core.redaction import REDACTED
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import EpisodeRequest, Message, Observation, StopReason, Trajectory
from openhands_rl_plugin.rollout.episode import EpisodeJournal, stored_episode
from openhands_rl_plugin.testing import ScriptedEngine, example_trajectory
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract

EXAMPLE = example_trajectory()


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[FileTrajectoryStorage]:
    async with FileTrajectoryStorage(tmp_path) as storage:
        yield storage


def frozen(tree: EpisodeTree, stop: StopReason = StopReason.MAX_TURNS) -> Trajectory:
    return tree.freeze(
        EpisodeRequest(task=EXAMPLE.task, run_id=EXAMPLE.run_id, group_id=EXAMPLE.group_id),
        trajectory_id=EXAMPLE.id,
        strategy=EXAMPLE.strategy,
        policy=EXAMPLE.policy,
        stop=stop,
        times=EXAMPLE.times,
    )


def observed(text: str, reward: float = 0.0) -> Observation:
    return Observation(messages=(Message(role="user", content=text),), reward=reward)


async def sampled(tree: EpisodeTree, text: str = "go") -> int:
    return tree.propose((await ScriptedEngine([text]).complete(tree.messages()))[0])


async def everything(storage: FileTrajectoryStorage) -> list[Trajectory]:
    return [found async for found, _ in storage.find(TrajectoryFilter(finished=None))]


async def test_a_write_that_has_begun_is_ended_before_its_caller_is_cancelled(
    storage: FileTrajectoryStorage, monkeypatch: pytest.MonkeyPatch
):
    grow, begun = storage.grow, asyncio.Event()

    async def slow(growth: EpisodeGrowth) -> None:
        begun.set()
        await asyncio.sleep(0.05)
        await grow(growth)

    monkeypatch.setattr(storage, "grow", slow)
    tree, journal = EpisodeTree(), EpisodeJournal(storage, EpisodeStart.of(EXAMPLE))
    tree.observe(observed("state"))
    keeping = asyncio.create_task(journal.keep(tree))
    await begun.wait()
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    (found,) = await everything(storage)
    assert len(found.nodes) == 1
    monkeypatch.undo()
    await journal.end(frozen(tree))
    assert await everything(storage) == [frozen(tree)]


STEPS = st.lists(
    st.sampled_from(["observe", "repeat", "propose", "below", "commit", "mark", "simulate", "think", "note", "keep"]),
    max_size=14,
)


@settings(deadline=None, max_examples=25)
@given(st.lists(STEPS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_whatever_is_done_to_a_tree_is_stored(lives: list[list[str]], chance: random.Random):
    """Several processes play one episode; each starts from what the one before has kept."""

    async def play() -> None:
        with TemporaryDirectory() as folder:
            async with FileTrajectoryStorage(folder, durable=False) as storage:
                tree, journal = EpisodeTree(), EpisodeJournal(storage, EpisodeStart.of(EXAMPLE))
                for steps in lives:
                    for step in steps:
                        await change(tree, step, chance)
                        if step == "keep":
                            await journal.keep(tree)
                    await journal.keep(tree)
                    kept = await stored_episode(storage, EXAMPLE.id)
                    assert kept is not None
                    assert (kept.head, bare(kept)) == (tree.head, bare(frozen(tree)))
                    tree, journal = EpisodeTree.thaw(kept), EpisodeJournal.resumed(storage, kept)
                await change(tree, "note", chance)
                await journal.end(frozen(tree))
                assert await everything(storage) == [frozen(tree)]

    asyncio.run(play())


def bare(trajectory: Trajectory) -> list[dict]:
    """The nodes without what a host noted on them after they were stored, which only the end stores."""
    search = [node.metadata.get("search") for node in trajectory.nodes]
    nodes = [node.model_dump(exclude={"metadata"}) for node in trajectory.nodes]
    return [{**node, "search": notes} for node, notes in zip(nodes, search, strict=True)]


async def change(tree: EpisodeTree, step: str, chance: random.Random) -> None:
    sampled_nodes = [at for at, node in enumerate(tree.nodes) if node.sampled]
    if step == "observe":
        tree.observe(observed(f"state {len(tree.nodes)}", chance.choice([0.0, 0.1, -1.0])))
    elif step == "repeat":
        tree.observe(Observation())
    elif step == "propose":
        await sampled(tree, f"go {len(tree.nodes)}")
    elif not sampled_nodes:
        return
    node = tree.nodes[chance.choice(sampled_nodes)] if sampled_nodes else None
    if node is None:
        return
    if step == "below":
        at = tree.append(Message(role="user", content="imagined"), parent=chance.choice(sampled_nodes))
        tree.propose((await ScriptedEngine(["deeper"]).complete(tree.messages(at)))[0], parent=at)
    elif step == "commit":
        tree.commit(chance.choice(sampled_nodes))
    elif step == "mark":
        node.value, node.visits = chance.random(), node.visits + 1
    elif step == "simulate":
        node.reward, node.simulated = 0.5, True
    elif step == "think":
        notes = node.metadata.setdefault("search", {})
        assert isinstance(notes, dict)
        notes["report"] = {"turn": {"calls": chance.randrange(3)}}
    elif step == "note":
        node.metadata["noted"] = len(tree.nodes)


async def test_what_a_search_notes_later_is_stored_without_secrets_and_without_storing_the_episode_again(
    storage: FileTrajectoryStorage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SHOP_API_KEY", "hunter2-hunter2")
    tree, journal = EpisodeTree(), EpisodeJournal(storage, EpisodeStart.of(EXAMPLE))
    tree.observe(observed("state"))
    node = await sampled(tree)
    await journal.keep(tree)
    tree.nodes[node].metadata["search"] = {"dropped": "the key hunter2-hunter2 is wrong", "state": 3}
    await journal.keep(tree)
    (found,) = await everything(storage)
    assert found.nodes[node].metadata["search"] == {"dropped": f"the key {REDACTED} is wrong", "state": 3}
    monkeypatch.setattr(storage, "add", None)
    tree.nodes[node].metadata["search"] = {"merged": 2}
    await journal.end(frozen(tree))
    assert await everything(storage) == [frozen(tree)]
